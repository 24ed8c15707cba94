"""Render conversations with a chat template, and find the character spans that the assistant emits."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from spec_trainer.data.end_of_turn import EndTokens
from spec_trainer.data.errors import BadRow, UnusableTemplate, row_errors
from spec_trainer.data.image_parts import count_images
from spec_trainer.data.layout import PLACEHOLDER, Layout
from spec_trainer.data.render_process import OverLimit, TemplateUnreadable, render_process
from spec_trainer.data.rows import Chat
from spec_trainer.data.served_messages import in_parts, loops_over_parts, served_messages, served_tool
from spec_trainer.data.turns import PROMPT_ROLES, Turn, TurnFinder, samples_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from spec_trainer.configuration.chat import ChatConfig
    from spec_trainer.data.frames import KnownTurns
    from spec_trainer.data.layout import Render


Spans = list[tuple[int, int]]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
UNWRITTEN = (
    "answers that the chat template does not write, not with their calls, or not as after a question; "
    "they are not trained"
)
HEADER_MARKED = "{% generation %} marks that begin before the answer"
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Some templates write today's date into the system prompt. Samples must not change overnight, or a run could not
# be resumed; this is the date that Llama 3's template itself falls back to.
_FIXED_DATE = date(2024, 7, 26)
_PART = {"type": "text", "text": PLACEHOLDER}
_LIST = re.compile(rf"""['"]text['"]: *['"]{PLACEHOLDER}""")
"""A part as Python or JSON writes it."""
_USUAL = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 3


@dataclass(frozen=True)
class Rendering:
    """A conversation, or the beginning of one, rendered as text."""

    text: str
    spans: Spans
    """(start, stop) of the characters that the assistant emits and the draft learns, ascending."""
    num_images: int
    """Number of the conversation's images that are in the text."""
    notes: tuple[str, ...] = ()
    """Remarks about the sample for the data report."""


class ChatRenderer:
    """Renders conversations with a chat template. Raises UnusableTemplate if none is configured or found."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
        """Use the chat template and variables of ``config``; by default the template of ``tokenizer``."""
        self._tokenizer = tokenizer
        self._config = config
        self._layouts: dict[tuple[str, bool], Layout] = {}
        self._usual: dict[tuple[str, bool, bool], KnownTurns] = {}
        self._part_roles: dict[tuple[str, bool], set[str]] = {}
        added = tokenizer.added_tokens_decoder.values()
        self._end_tokens = EndTokens(
            {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        )

    def render(self, chat: Chat, last_turn_only: bool) -> list[Rendering]:
        """Return the conversation as the texts of its samples, with the spans that the draft is trained on.

        There are several if the template renders answers differently once other messages follow them. Raise
        BadRow if the template rejects the conversation, or if the span of a supervised turn is not certain.
        """
        template = self._template(chat)
        chat = replace(chat, messages=self._served(chat.messages, template))
        text, marks = self._render(chat, chat.messages, marked=_MARKS.search(template) is not None)
        whole = Rendering(text, marks, count_images(chat.messages))
        turns, notes = self._turns(chat, text, chat.trained(last_turn_only))
        if not turns:
            return [replace(whole, spans=[], notes=notes)]
        return [self._rendering(chat, whole, sample, notes) for sample in samples_of(turns)]

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
        """Text by which the template joins two text parts; a line break if it does not simply join them."""
        first, second = "QFIRSTPARTQ", "QSECONDPARTQ"

        def render(content: object) -> str | None:
            probe = Chat([{"role": "user", "content": content}])
            return self._try_render(probe)(probe.messages, True)

        text = render([{"type": "text", "text": part} for part in (first, second)]) or ""
        between = text.partition(first)[2].partition(second)[0]
        return between if text and text == render(first + between + second) else "\n"

    def _rendering(
        self, chat: Chat, whole: Rendering, turns: Sequence[Turn], notes: tuple[str, ...]
    ) -> Rendering:
        """Return one sample; its text is the whole conversation if that begins like what was seen and generated.

        ``whole``: the whole conversation, whose spans are the template's marks, if it has any.
        """
        last = turns[-1]
        shown = whole
        if not whole.text.startswith(last.after):
            shown = Rendering(last.after, [], count_images(last.messages))
        if _MARKS.search(self._template(chat)) is None:
            return replace(shown, spans=[(turn.start, turn.stop) for turn in turns], notes=notes)
        marked = [self._marked(chat, whole, turn) for turn in turns]
        early = any(
            start < turn.start for turn, marks in zip(turns, marked, strict=True) for start, _ in marks
        )
        return replace(shown, spans=list(chain(*marked)), notes=(*notes, *[HEADER_MARKED] * early))

    def _marked(self, chat: Chat, whole: Rendering, turn: Turn) -> Spans:
        """Return which characters of a turn are in ``{% generation %}`` blocks of the template."""
        marks = whole.spans
        if not whole.text.startswith(turn.after):
            _, found = self._render(chat, turn.messages, marked=True)
            marks = [(start + turn.moved, stop + turn.moved) for start, stop in found]
        return [
            (start, min(stop, turn.stop)) for start, stop in marks if start < turn.stop and turn.start < stop
        ]

    def _turns(self, chat: Chat, whole: str, indices: Sequence[int]) -> tuple[list[Turn], tuple[str, ...]]:
        """Return the turns at ``indices``, and notes about those that the template does not write."""
        if indices and self._layout(chat).adds_text:
            raise BadRow(
                "the chat template writes text of its own after the last answer, as for a judge of answers"
            )
        usual = self._usual_turns(chat) if len(indices) > 1 else {}
        finder = replace(self._finder(chat, whole), usual=usual)
        found: list[Turn] = []
        for index, turn in zip(indices, finder.turns(indices), strict=True):
            if turn is None and not all(message["role"] in PROMPT_ROLES for message in chat.messages[:index]):
                raise BadRow("assistant turn not found in the rendered conversation", _way_out(chat, index))
            found += [turn] if turn and finder.is_written(turn) else []
        return found, (UNWRITTEN,) if len(found) < len(indices) else ()

    def _finder(self, chat: Chat, whole: str) -> TurnFinder:
        return TurnFinder(chat.messages, whole, self._try_render(chat), self._layout(chat), self._end_tokens)

    def _usual_turns(self, chat: Chat) -> KnownTurns:
        """Return what a fixed example conversation shows about turns with the same text around them.

        It has tools and a system prompt if ``chat`` does; templates may move these as the conversation goes on.
        """
        prompts = [
            {**message, "content": "x"} for message in chat.messages[:1] if message["role"] in PROMPT_ROLES
        ]
        key = (*self._form(chat), bool(prompts))
        if key not in self._usual:
            example = Chat([*prompts, *_USUAL], chat.tools)
            text = self._try_render(example)(example.messages, False)
            self._usual[key] = self._finder(example, text).known(example.answers) if text else {}
        return self._usual[key]

    def _layout(self, chat: Chat) -> Layout:
        key = self._form(chat)
        if key not in self._layouts:
            self._layouts[key] = Layout.of(self._try_render(chat), self._end_tokens)
        return self._layouts[key]

    def _form(self, chat: Chat) -> tuple[str, bool]:
        """Return what the layout depends on; templates may write other text if there are tools."""
        return self._template(chat), bool(chat.tools)

    def _try_render(self, chat: Chat) -> Render:
        def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str | None:
            try:
                return self._render(chat, messages, prompt=prompt)[0]
            except OverLimit:  # each further rendering would take as long
                raise
            except BadRow:
                return None

        return render

    def _roles_in_parts(self, chat: Chat) -> set[str]:
        """Return the roles whose texts the template gets as a list of one part, as from vLLM.

        Some templates read parts of one role, and write the list itself for another, or drop it.
        """
        key = self._form(chat)
        if key not in self._part_roles:
            # Kept from the start: the question beside a probe is rendered as was found for users.
            found = self._part_roles[key] = set()
            for role in ("user", "system", "developer", "assistant") if loops_over_parts(key[0]) else ():
                found |= {role} if self._reads_part(chat, role) else set()
        return self._part_roles[key]

    def _reads_part(self, chat: Chat, role: str) -> bool:
        probe = {"role": role, "content": [_PART]}
        question = {"role": "user", "content": "x"}
        around = {"user": [probe], "assistant": [question, probe]}
        text = self._try_render(chat)(around.get(role, [probe, question]), False) or ""
        return PLACEHOLDER in text and not _LIST.search(text)

    def _render(
        self, chat: Chat, messages: Sequence[dict[str, Any]], *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, Spans]:
        messages = in_parts(messages, self._roles_in_parts(chat))
        template = self._template(chat)
        kwargs = self._config.chat_template_kwargs
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

    def _unreadable(self, line: int, problem: str) -> UnusableTemplate:
        of = "in data.chat_template" if self._config.chat_template else f"of '{self._tokenizer.name_or_path}'"
        return UnusableTemplate(
            f"the chat template {of} is no template of jinja: line {line}: {problem}",
            "mend it, or set data.chat_template to the file of another",
        )

    def _template(self, chat: Chat) -> str:
        template = self._config.chat_template
        # ValueError: there is no template. Any other error: it is not a usable one.
        with suppress(Exception):
            template = template or self._tokenizer.get_chat_template(tools=chat.tools)
        if not isinstance(template, str):
            raise UnusableTemplate(
                f"the tokenizer in '{self._tokenizer.name_or_path}' has no chat template, which conversations need",
                "put its chat_template.jinja there, set data.chat_template to a file, or give rows of text or of "
                "input_ids with loss_mask",
            )
        return _undated(template)


@lru_cache
def _undated(template: str) -> str:
    return _TODAY.sub(lambda match: repr(_FIXED_DATE.strftime(match[2])), template)


def _way_out(chat: Chat, index: int) -> str:
    where = (
        f"message {index + 1} of {len(chat.messages)}; {{% generation %}} marks in the template would show it"
    )
    later = any(message["role"] == "assistant" for message in chat.messages[index + 1 :])
    return f"{where}, and data.last_turn_only=true needs the last turn only" if later else where
