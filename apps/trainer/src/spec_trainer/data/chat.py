"""Render conversations with a chat template, and find the character spans that the assistant emits."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from spec_core.errors import DataError
from spec_trainer.data.errors import BadRow, row_errors
from spec_trainer.data.render_process import OverLimit, TemplateUnreadable, render_process
from spec_trainer.data.rows import Chat
from spec_trainer.data.served_messages import served_messages, served_tool
from spec_trainer.data.turns import Around, EndTokens, Frames, Render, TurnFinder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from spec_trainer.configuration.chat import ChatConfig


Spans = list[tuple[int, int]]

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_OPENED = re.compile(r"<think>\s*\Z")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Some templates write today's date into the system prompt. Samples must not change overnight, or a run could not
# be resumed; this is the date that Llama 3's template itself falls back to.
_FIXED_DATE = date(2024, 7, 26)
_PLAIN = [{"role": role, "content": "x"} for role in ("user", "assistant")]
_TOOL_USE = [
    _PLAIN[0],
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "x", "arguments": {}}}]},
    {"role": "tool", "content": "x"},
    _PLAIN[1],
]
_USUAL = [Chat(messages) for messages in (_PLAIN * 3, _TOOL_USE + _PLAIN, _PLAIN + _TOOL_USE)]


@dataclass(frozen=True)
class Rendering:
    """A conversation rendered as text."""

    text: str
    spans: Spans
    """(start, stop) of the characters that the assistant emits and the draft learns, ascending."""


class ChatRenderer:
    """Renders conversations with a chat template. Raises DataError if no template is configured or found."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
        """Use the chat template and variables of ``config``; by default the template of ``tokenizer``."""
        self._tokenizer = tokenizer
        self._config = config
        self._usual: dict[str, Frames] = {}
        added = tokenizer.added_tokens_decoder.values()
        self._end_tokens = EndTokens(
            {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        )

    def render(self, chat: Chat, last_turn_only: bool) -> Rendering:
        """Return the rendered conversation with the character spans that the draft is trained on.

        Raise BadRow if the template rejects the conversation, or if the span of a supervised turn is not certain.
        """
        template = self._template(chat)
        chat = replace(chat, messages=self._served(chat.messages, template))
        marked = _MARKS.search(template) is not None
        text, marks = self._render(chat, chat.messages, marked=marked)
        turns = chat.trained(last_turn_only)
        if not marked:
            return Rendering(text, self._found(chat, text, turns))
        if turns == chat.answers:
            return Rendering(text, marks)
        borders = [(self._marks_before(chat, index), self._marks_before(chat, index + 1)) for index in turns]
        return Rendering(text, [mark for start, stop in borders for mark in marks[start:stop]])

    def opening(self, chat: Chat, messages: Sequence[dict[str, Any]]) -> str:
        """Render ``messages`` and the generation prompt after them.

        The tools and the template variables are taken from ``chat``.
        """
        return self._render(chat, self._served(messages, self._template(chat)), prompt=True)[0]

    def _served(self, messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        in_parts = any(isinstance(message.get("content"), list) for message in messages)
        return served_messages(messages, template, self._between_parts if in_parts else "")

    @cached_property
    def _between_parts(self) -> str:
        """Text that the template writes between two text parts; a line break if it rejects parts."""
        first, second = "QFIRSTPARTQ", "QSECONDPARTQ"

        def render(content: object) -> str | None:
            probe = Chat([{"role": "user", "content": content}])
            return self._try_render(probe)(probe.messages, True)

        text = render([{"type": "text", "text": part} for part in (first, second)]) or ""
        between = text.partition(first)[2].partition(second)[0]
        return between if text and text == render(first + between + second) else "\n"

    def _marks_before(self, chat: Chat, index: int) -> int:
        """Return how many ``{% generation %}`` blocks the template writes before message ``index``."""
        return len(self._render(chat, chat.messages[:index], marked=True)[1]) if index > 0 else 0

    def _found(self, chat: Chat, text: str, turns: Sequence[int]) -> Spans:
        usual = self._usual_frames(self._template(chat)) if len(turns) > 1 else {}
        finder = replace(self._finder(chat, text), usual=usual)
        spans = []
        for index, span in zip(turns, finder.spans(turns), strict=False):
            if span is None:
                raise BadRow("assistant turn not found in the rendered conversation", _way_out(chat, index))
            spans.append(_without_empty_thought(text, span, chat.messages[index]))
        return spans

    def _finder(self, chat: Chat, text: str) -> TurnFinder:
        return TurnFinder(chat.messages, text, self._try_render(chat), self._has_prompt, self._end_tokens)

    def _usual_frames(self, template: str) -> Frames:
        """Return the text that the template writes around answers (``Frames``), learned from fixed examples."""
        if template not in self._usual:
            found: list[tuple[Around, tuple[int, int]]] = []
            for chat in (one for one in _USUAL if self._template(one) == template):
                text = self._try_render(chat)(chat.messages, False)
                if text is not None:
                    found += self._finder(chat, text).frames(chat.answers)
            frames = dict(found)
            certain = all(frames[around] == span for around, span in found)
            self._usual[template] = frames if certain else {}
        return self._usual[template]

    def _try_render(self, chat: Chat) -> Render:
        def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str | None:
            try:
                return self._render(chat, messages, prompt=prompt)[0]
            except OverLimit:  # each further rendering would take as long
                raise
            except BadRow:
                return None

        return render

    @cached_property
    def _has_prompt(self) -> bool:
        probe = Chat([{"role": "user", "content": "x"}])
        render = self._try_render(probe)
        return render(probe.messages, True) != render(probe.messages, False)

    def _render(
        self, chat: Chat, messages: Sequence[dict[str, Any]], *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, Spans]:
        template, kwargs = self._template(chat), self._config.chat_template_kwargs
        with row_errors("refused by the chat template"):
            try:
                return render_process().render(
                    conversations=[[{"content": "", **message} for message in messages]],
                    tools=[served_tool(tool) for tool in chat.tools] if chat.tools else None,
                    chat_template=template,
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **{**self._tokenizer.special_tokens_map, **kwargs},
                )
            except TemplateUnreadable as error:  # no row can be rendered
                raise self._unreadable(*error.args) from error

    def _unreadable(self, line: int, problem: str) -> DataError:
        of = "in data.chat_template" if self._config.chat_template else f"of '{self._tokenizer.name_or_path}'"
        return DataError(
            f"the chat template {of} is no template of jinja: line {line}: {problem}; mend it, or set "
            "data.chat_template to the file of another"
        )

    def _template(self, chat: Chat) -> str:
        template = self._config.chat_template
        # ValueError: there is no template. Any other error: it is not a usable one.
        with suppress(Exception):
            template = template or self._tokenizer.get_chat_template(tools=chat.tools)
        if not isinstance(template, str):
            raise DataError(
                f"the tokenizer in '{self._tokenizer.name_or_path}' has no chat template, which conversations need: "
                "put its chat_template.jinja there, set data.chat_template to a file, or give rows of text or of "
                "input_ids with loss_mask"
            )
        return _undated(template)


@lru_cache
def _undated(template: str) -> str:
    return _TODAY.sub(lambda match: repr(_FIXED_DATE.strftime(match[2])), template)


def _without_empty_thought(text: str, span: tuple[int, int], message: dict[str, Any]) -> tuple[int, int]:
    """Return the span without an empty ``<think>`` block that the template writes.

    A target with reasoning enabled does not emit an empty block; with reasoning disabled, the block is in the prompt.
    """
    start, stop = span
    opened = _OPENED.search(text, max(0, start - 20), start)  # by the generation prompt
    block = _EMPTY_THOUGHT.match(text, opened.start() if opened else start, stop)
    own = _EMPTY_THOUGHT.match(str(message.get("content", "")).lstrip())
    return (block.end(), stop) if block and not own else span


def _way_out(chat: Chat, index: int) -> str:
    where = (
        f"message {index + 1} of {len(chat.messages)}; {{% generation %}} marks in the template would show it"
    )
    later = any(message["role"] == "assistant" for message in chat.messages[index + 1 :])
    return f"{where}, and data.last_turn_only=true needs the last turn only" if later else where
