"""Generate new answers for a row, turn by turn; each prompt contains the new answers to earlier turns.

System, user and tool messages are copied; each answer of the assistant is replaced by a generated answer. Two
kinds of assistant messages are copied too: a message before the first question, and a message with tool
calls, because the tool results after it belong to its calls. If an assistant message directly follows a
replaced answer, it continued that answer and is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_core.records import ImageSource, images_of
from spec_trainer.data.errors import BadRow
from spec_trainer.data.image_parts import ROW_KEYS, TEXT_PROMPTS, count_images
from spec_trainer.data.row_images import written_images
from spec_trainer.data.rows import Chat, Text, Tokens, parse_row
from spec_trainer.data.tokens import Encoder, Opening, prompt_of

_ASKING = ("user", "tool", "function")
_ROW_KEYS = ("system", "messages", "conversations", "text", "input_ids", "loss_mask")


class Conversation(ABC):
    """A row of the data while its turns are answered.

    ``prompt`` has the token ids of the next prompt, and is empty at the end; ``take`` stores the answer to
    ``prompt``.
    """

    def __init__(self, encoder: Encoder, eos_token_ids: Sequence[int]) -> None:
        """Start with an empty prompt; a subclass sets the first prompt."""
        self.encoder = encoder
        self.prompt: Sequence[int] = []
        """Token ids of the next prompt, with its images; empty if all turns are answered."""
        self.sources: tuple[ImageSource, ...] = ()
        """All images of the row."""
        self.kept: list[tuple[int, int]] = []
        """(start, stop) of the earlier answers in ``prompt`` whose tokens are as they were generated."""
        self.was_cut = False
        """Whether an answer was cut at ``max_new_tokens``, or the next prompt would have been too long."""
        self.num_generated = 0
        self.input_ids: list[int] = []
        """Token ids of the last prompt and its answer."""
        self.spans: list[tuple[int, int]] = []
        """(start, stop) of the answers in ``input_ids``."""
        self._eos_token_ids = frozenset(eos_token_ids)

    def take(self, token_ids: Sequence[int], max_new_tokens: int) -> None:
        """Store the answer to ``prompt``, and set the next prompt. A cut answer ends the conversation."""
        self.input_ids = [*self.prompt, *token_ids]
        self.spans = [*self.kept, (len(self.prompt), len(self.input_ids))]
        answer = self.without_end(token_ids)
        ended = len(answer) < len(token_ids) or len(token_ids) < max_new_tokens
        self.was_cut = not ended
        self.num_generated += len(token_ids)
        self.prompt = []
        self.proceed(answer)

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return an answer's token ids without a final end-of-sequence token."""
        ended = bool(token_ids) and token_ids[-1] in self._eos_token_ids
        return list(token_ids[:-1] if ended else token_ids)

    def row(self, number: int, original: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answered row as training data, with further keys of the row ``original``.

        ``number``: index of the row in the data, which is the last key.
        """
        mask = [0] * len(self.input_ids)
        for start, stop in self.spans:
            mask[start:stop] = [1] * (stop - start)
        images = written_images(self.images())
        replaced = {*_ROW_KEYS, *(ROW_KEYS if images else ()), "row"}
        return {
            **{key: value for key, value in original.items() if key not in replaced and value is not None},
            **self.text_form(),
            "input_ids": self.input_ids,
            "loss_mask": mask,
            **({"images": images} if images else {}),
            "finish_reason": "length" if self.was_cut else "stop",
            "row": number,
        }

    @abstractmethod
    def proceed(self, answer: list[int]) -> None:
        """Set ``prompt`` to the next prompt, or to an empty prompt at the end.

        ``answer``: the tokens of the last answer, which are already in ``input_ids``.
        """

    @abstractmethod
    def images(self) -> Sequence[Any]:
        """Return the images in ``input_ids``, as the row gives them (such as paths), in their order."""

    @abstractmethod
    def text_form(self) -> dict[str, Any]:
        """Return the keys of the answered row that hold the conversation as text: ``messages`` or ``text``."""


class Continuation(Conversation):
    """A row without turns, which has one answer.

    It is a text that the target continues, or tokens whose last supervised span the target's answer replaces.
    """

    def __init__(self, row: Text | Tokens, encoder: Encoder, eos_token_ids: Sequence[int]) -> None:
        """Set the prompt: the text's tokens, or the tokens before the last supervised span."""
        super().__init__(encoder, eos_token_ids)
        self.prompt = encoder.prompt(row)
        self.sources = images_of(self.prompt)
        self._text = row.text if isinstance(row, Text) else None
        self._images = row.images if isinstance(row, Tokens) else ()

    def proceed(self, answer: list[int]) -> None:
        """Add the answer to the text; no prompt follows."""
        if self._text is not None:
            self._text += self.encoder.decode(answer)

    def images(self) -> Sequence[Any]:
        """Return the images of the row's tokens."""
        return self._images

    def text_form(self) -> dict[str, Any]:
        """Return the text with its continuation if the row is a text, else an empty dict."""
        return {} if self._text is None else {"text": self._text}


class Dialogue(Conversation):
    """A chat in which each answer is replaced by a generated answer."""

    def __init__(self, chat: Chat, encoder: Encoder, eos_token_ids: Sequence[int], longest: int) -> None:
        """Set the first prompt. ``longest``: the most tokens of a prompt."""
        super().__init__(encoder, eos_token_ids)
        self._chat = chat
        self._longest = longest
        self._rest = list(chat.messages)
        self._messages: list[dict[str, Any]] = []
        self._known: list[tuple[str, int]] = []
        """Two beginnings of the text, each with its number of tokens in ``input_ids``: the text up to the
        last answer, with the answer's end token and without it."""
        self.prompt = self._next_prompt()
        self.sources = images_of(self.prompt)
        # Images of later questions are read now, too, so that a bad one is found at once.
        if len(chat.images) > len(self.sources):
            self.sources = encoder.image_sources(chat.images)

    def proceed(self, answer: list[int]) -> None:
        """Set the next prompt; an empty one if the chat ends, becomes too long, or the template rejects it."""
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
            self.was_cut = True
            prompt = []
        self.prompt = prompt

    def images(self) -> Sequence[Any]:
        """Return the images of the messages up to the last answer."""
        return self._chat.images[: count_images(self._messages[: self._answers])]

    def text_form(self) -> dict[str, Any]:
        """Return the messages up to the last answer, and the tools and template variables if there are any."""
        optional = {"tools": self._chat.tools, "chat_template_kwargs": self.encoder.chat_template_kwargs}
        return {
            "messages": self._messages[: self._answers],
            **{key: value for key, value in optional.items() if value},
        }

    def _next_prompt(self) -> Sequence[int]:
        """Copy messages up to the next answer, and return the answer's prompt, or [] at the end.

        Raise BadRow if the prompt cannot be rendered or encoded.
        """
        while self._rest and not self._is_to_be_answered():
            self._messages.append(self._rest.pop(0))
        if not self._asked():
            return []
        if self._rest:
            self._rest.pop(0)
        self._opening = self.encoder.opening(self._chat, self._messages)
        return prompt_of(self._in_context(self._opening), self._opening.images)

    def _is_to_be_answered(self) -> bool:
        return self._rest[0]["role"] == "assistant" and self._asked() and not self._rest[0].get("tool_calls")

    def _asked(self) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] in _ASKING

    def _in_context(self, opening: Opening) -> list[int]:
        """Return the token ids of the rendered prompt ``opening``; earlier answers keep their tokens.

        The tokenizer might split an answer's text differently than it was generated. If the prompt does not
        begin with the text so far, such as with a template that drops earlier reasoning, the tokenizer's ids
        are returned, and earlier answers are not supervised.
        """
        for text, length in self._known:
            first = _border(opening, len(text)) if opening.text.startswith(text) else None
            if first is not None:
                self.kept = [*self.spans[:-1], (self.spans[-1][0], length)]
                return self.input_ids[:length] + opening.input_ids[first:]
        self.kept = []
        return opening.input_ids


def _border(opening: Opening, position: int) -> int | None:
    """Return the index of the token that begins at character ``position``; None if no token begins there."""
    after = np.flatnonzero(opening.offsets[:, 0] >= position)
    if not len(after) or (opening.offsets[: after[0], 1] > position).any():
        return None
    return int(after[0])


def open_conversation(
    content: object,
    encoder: Encoder,
    eos_token_ids: Sequence[int],
    longest: int,
    no_images: str = TEXT_PROMPTS,
) -> Conversation:
    """Return the Conversation in which a row of the data is answered.

    ``no_images``: reason for refusing images; empty if they are allowed. Raise BadRow for a row of unknown
    form, without a prompt, or with a prompt of more than ``longest`` tokens.
    """
    row = parse_row(content, no_images)
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
