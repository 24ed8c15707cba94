"""Answer a row anew: replay its turns in order, each answer in the context of the answers before it.

Messages of system, user and tools are kept; each answer of the assistant is generated. Also kept are an assistant's
message before the first question, and one that calls tools, because the results that follow belong to that call. An
assistant's message right after another one was its continuation, and is dropped with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_trainer.data.errors import BadRow
from spec_trainer.data.rows import Chat, Text, parse_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_trainer.data.rows import Tokens
    from spec_trainer.data.tokens import Encoder, Opening

_ASKING = ("user", "tool", "function")
_ROW_KEYS = ("messages", "conversations", "text", "input_ids", "loss_mask")


class Conversation(ABC):
    """A row being answered: has a prompt and takes its answer, until no prompt is left; ``row`` is for training."""

    def __init__(self, encoder: Encoder, eos_token_ids: Sequence[int]) -> None:
        """Begin with no prompt; a subclass sets the first one."""
        self.encoder = encoder
        self.prompt: list[int] = []
        """Token ids of the next prompt; empty if nothing is left to answer."""
        self.kept: list[tuple[int, int]] = []
        """Spans of ``prompt`` that are earlier answers, token for token as they were generated."""
        self.was_cut = False
        """Whether an answer was cut, or the next prompt would have been too long."""
        self.num_generated = 0
        self.input_ids: list[int] = []
        """The context of the last answer, and that answer."""
        self.spans: list[tuple[int, int]] = []
        """Spans of ``input_ids`` that are answers."""
        self._eos_token_ids = frozenset(eos_token_ids)

    def take(self, token_ids: Sequence[int], max_new_tokens: int) -> None:
        """Take the answer to ``prompt``. One that was cut ends the conversation: half an answer gets no reply."""
        self.input_ids = [*self.prompt, *token_ids]
        self.spans = [*self.kept, (len(self.prompt), len(self.input_ids))]
        answer = self.without_end(token_ids)
        ended = len(answer) < len(token_ids) or len(token_ids) < max_new_tokens
        self.was_cut = not ended
        self.num_generated += len(token_ids)
        self.prompt = []
        self.proceed(answer)

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return an answer without its end token."""
        ended = bool(token_ids) and token_ids[-1] in self._eos_token_ids
        return list(token_ids[:-1] if ended else token_ids)

    def row(self, number: int, original: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answered row ``number``, with the keys of ``original`` that are not its content."""
        mask = [0] * len(self.input_ids)
        for start, stop in self.spans:
            mask[start:stop] = [1] * (stop - start)
        return {
            **{key: value for key, value in original.items() if key not in _ROW_KEYS and value is not None},
            **self.text_form(),
            "input_ids": self.input_ids,
            "loss_mask": mask,
            "finish_reason": "length" if self.was_cut else "stop",
            "row": number,
        }

    @abstractmethod
    def proceed(self, answer: list[int]) -> None:
        """Set the next ``prompt``, if there is one; ``answer`` is already in ``input_ids``."""

    @abstractmethod
    def text_form(self) -> dict[str, Any]:
        """Return the keys of the answered row that hold text."""


class Continuation(Conversation):
    """A text, which the target continues; or tokens, the last supervised run of which is replaced."""

    def __init__(self, row: Text | Tokens, encoder: Encoder, eos_token_ids: Sequence[int]) -> None:
        """Take the row as the prompt."""
        super().__init__(encoder, eos_token_ids)
        self.prompt = encoder.prompt(row)
        self._text = row.text if isinstance(row, Text) else None

    def proceed(self, answer: list[int]) -> None:
        """Add the answer to the text; no prompt follows."""
        if self._text is not None:
            self._text += self.encoder.decode(answer)

    def text_form(self) -> dict[str, Any]:
        """Return the text, where the row had one."""
        return {} if self._text is None else {"text": self._text}


class Dialogue(Conversation):
    """A chat, each answer of which is generated anew."""

    def __init__(self, chat: Chat, encoder: Encoder, eos_token_ids: Sequence[int], longest: int) -> None:
        """Start with the first prompt; ``longest``: the number of tokens that a prompt may have."""
        super().__init__(encoder, eos_token_ids)
        self._chat = chat
        self._longest = longest
        self._rest = list(chat.messages)
        self._messages: list[dict[str, Any]] = []
        self._known: list[tuple[str, int]] = []
        """The text so far and its number of ``input_ids``, with the last answer's end token and without."""
        self.prompt = self._next_prompt()

    def proceed(self, answer: list[int]) -> None:
        """Set the next prompt; none if the conversation ends, is too long, or is refused by the template."""
        self._known = [
            (
                self._opening.text + self.encoder.decode(self.input_ids[self.spans[-1][0] :]),
                len(self.input_ids),
            ),
            (self._opening.text + self.encoder.decode(answer), self.spans[-1][0] + len(answer)),
        ]
        self._messages.append({"role": "assistant", "content": self.encoder.decode(answer)})
        self._answers = len(self._messages)
        while self._rest and self._rest[0]["role"] == "assistant":
            self._rest.pop(0)
        try:
            prompt = self._next_prompt() if self._rest and not self.was_cut else []
        except BadRow:
            prompt = []
        if len(prompt) > self._longest:
            self.was_cut, prompt = True, []
        self.prompt = prompt

    def text_form(self) -> dict[str, Any]:
        """Return the messages up to the last answer, the tools, and the template's variables where there are any."""
        beside = {"tools": self._chat.tools, "chat_template_kwargs": self.encoder.chat_template_kwargs}
        return {
            "messages": self._messages[: self._answers],
            **{key: value for key, value in beside.items() if value},
        }

    def _next_prompt(self) -> list[int]:
        """Take over messages up to the next answer, and return its prompt. Raise BadRow."""
        while self._rest and not self._is_to_be_answered():
            self._messages.append(self._rest.pop(0))
        if not self._asked():
            return []
        if self._rest:
            self._rest.pop(0)
        self._opening = self.encoder.opening(self._chat, self._messages)
        return self._in_context(self._opening)

    def _is_to_be_answered(self) -> bool:
        return self._rest[0]["role"] == "assistant" and self._asked() and not self._rest[0].get("tool_calls")

    def _asked(self) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] in _ASKING

    def _in_context(self, opening: Opening) -> list[int]:
        """Return the prompt's tokens.

        Where its text begins with the text so far, it keeps those tokens, which the tokenizer might not give for the
        same text. Elsewhere (with a template that drops reasoning, say) earlier answers are no longer what was
        generated, and are not supervised.
        """
        for text, length in self._known:
            first = _border(opening, len(text)) if opening.text.startswith(text) else None
            if first is not None:
                self.kept = [*self.spans[:-1], (self.spans[-1][0], length)]
                return self.input_ids[:length] + opening.input_ids[first:]
        self.kept = []
        return opening.input_ids


def _border(opening: Opening, position: int) -> int | None:
    """Return the token that begins at character ``position``, or None."""
    after = np.flatnonzero(opening.offsets[:, 0] >= position)
    if not len(after) or (opening.offsets[: after[0], 1] > position).any():
        return None
    return int(after[0])


def open_conversation(
    content: object, encoder: Encoder, eos_token_ids: Sequence[int], longest: int
) -> Conversation:
    """Return the conversation of a row.

    Raise BadRow for a row without a shape, without a prompt, or with a prompt of more than ``longest`` tokens.
    """
    row = parse_row(content)
    conversation: Conversation
    if isinstance(row, Chat):
        conversation = Dialogue(row, encoder, eos_token_ids, longest)
    else:
        conversation = Continuation(row, encoder, eos_token_ids)
    if not conversation.prompt:
        raise BadRow("nothing to answer")
    if len(conversation.prompt) > longest:
        raise BadRow("prompt too long", f"{len(conversation.prompt)} tokens, {longest} are possible")
    return conversation
