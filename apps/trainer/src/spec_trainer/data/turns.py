"""Find an assistant turn in a rendered conversation, for chat templates that do not mark it.

A turn begins where the generation prompt ends and ends with its end-of-turn token. Both borders come from
rendering the conversation up to there, and count only if that rendering is literally the beginning of the whole
one. Templates that render a turn differently once others follow it (reasoning that is dropped from earlier turns,
another end-of-turn token) fail that test; then the turn's content is replaced by a placeholder, and what the
template put around the placeholder must be found, literally, around the content. Nothing is guessed: a border
that neither way confirms is None.

There are few kinds of turns: where a rendering with placeholders for all contents shows that the template writes
the same around two of them, of this conversation or of a plain one (``usual``), the borders of the one are
those of the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

Message = dict[str, Any]
Render = Callable[["Sequence[Message]", bool], "str | None"]
"""(messages, with generation prompt) -> text, or None if the template refuses them."""

# Plain ASCII letters: no template trims or escapes them, no text contains them by accident.
_PLACEHOLDER = "QPLACEHOLDERQXJZKVWQ"
_NUMBERED = re.compile(rf"{_PLACEHOLDER}(\d+)Q")
_EMPTY_THOUGHT_AT_END = re.compile(r"<think>\s*</think>\s*\Z")
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

_FEW = 1
"""Up to so many turns, each is found by itself, with two renderings of all that is before it."""
_MOST = 200
"""Turns of one conversation that may be found so, because the time grows with the square of its length."""

Span = tuple[int, int]
Around = tuple[str, str, str, str]
"""The roles of the messages before and after one, and what the template writes before and behind its content."""
Frames = dict[Around, Span]
"""How much of what is before a content the turn begins with, and of what is behind it the turn ends with."""


@dataclass(frozen=True)
class TurnFinder:
    """Assistant turns of one conversation; ``text`` is its whole rendering."""

    messages: Sequence[Message]
    text: str
    render: Render
    has_prompt: bool
    """Whether the template has generation prompts. Without, only a placeholder shows where an answer begins."""
    end_tokens: EndTokens = field(repr=False)
    usual: Frames = field(default_factory=Frames, repr=False)
    """Turns that the template is known to write."""

    def spans(self, turns: Sequence[int]) -> Iterator[Span | None]:
        """Yield for each of the messages ``turns`` the span that the assistant emits: content and end of turn.

        The last item is None if a span is not certain.
        """
        frames = self._frames() if len(turns) > _FEW else {}
        known = dict(self.usual)
        searched = 0
        for index in turns:
            frame = frames.get(index)
            borders = frame.place(known) if frame else None
            if borders is None:
                searched += 1
                borders = self._borders(index) if searched <= _MOST else None
                if frame and borders:
                    frame.learn(known, borders)
            if borders is None:
                yield None
                return
            yield borders[0], self.end_tokens.close(self.text, *borders)

    def frames(self, turns: Sequence[int]) -> Iterator[tuple[Around, Span]]:
        """Yield items of ``Frames``: what the template writes around the messages ``turns``, each found by itself."""
        for index, frame in self._frames().items():
            known: Frames = {}
            if index in turns and (borders := self._borders(index)):
                frame.learn(known, borders)
            yield from known.items()

    def _borders(self, index: int) -> Span | None:
        """Return the span of the turn and the layout behind it."""
        start, stop = self._start(index), self._stop(index)
        if start is None or stop is None:
            content = self._around_placeholder(index)
            calls_alone = self.messages[index].get("content") is None
            if content is None or (stop is None and calls_alone):
                return None
            start = content[0] if start is None else start
            stop = content[1] if stop is None else stop
        return (start, stop) if start <= stop else None

    def _frames(self) -> dict[int, ContentFrame]:
        """Return contents with what is around them, those of tools where the template writes them as they are."""
        spoken = {message["role"] for message in self.messages}
        return self._framed(spoken) or (self._framed(spoken - {"tool"}) if "tool" in spoken else {})

    def _framed(self, roles: Collection[str]) -> dict[int, ContentFrame]:
        """Return the contents of ``roles`` and what is around them, from one rendering with placeholders.

        Return nothing where the text is not exactly that rendering with the contents in place. To a template, no
        content is not like any other.
        """
        numbered = [
            {**message, "content": f"{_PLACEHOLDER}{index}Q"}
            if message.get("content") and message["role"] in roles
            else message
            for index, message in enumerate(self.messages)
        ]
        text = self.render(numbered, False)
        if text is None:
            return {}
        first, *rest = _NUMBERED.split(text)
        indices, between = list(map(int, rest[::2])), [first, *rest[1::2]]
        spoken = ["", *(message["role"] for message in self.messages), ""]
        frames: dict[int, ContentFrame] = {}
        position = len(first)
        if indices != sorted(set(indices)) or not self.text.startswith(first):
            return {}
        for index, (before, after) in zip(indices, pairwise(between), strict=True):
            content = self.messages[index]["content"]
            written = next(
                (c for c in (content, content.strip()) if self.text.startswith(c + after, position)), None
            )
            if written is None:
                return {}
            around = spoken[index], spoken[index + 2], before, after
            frames[index] = ContentFrame(position, position + len(written), around)
            position += len(written) + len(after)
        return frames if position == len(self.text) else {}

    def _start(self, index: int) -> int | None:
        before = self.render(self.messages[:index], True) if self.has_prompt and index > 0 else None
        if before is None or self.text.startswith(before):
            return None if before is None else len(before)
        # Thinking off, the prompt holds an empty thought. The text has none there, or the row's own.
        header = _EMPTY_THOUGHT_AT_END.sub("", before)
        if header == before or not self.text.startswith(header):
            return None
        thought = _THOUGHT.match(self.text, len(header))
        return thought.end() if thought else len(header)

    def _stop(self, index: int) -> int | None:
        if not self.has_prompt:
            return None  # the rendering may go on with the header of the next answer
        upto = (
            self.text if index == len(self.messages) - 1 else self.render(self.messages[: index + 1], False)
        )
        if upto is not None and self.text.startswith(upto):
            return len(upto)
        return self._stop_before_question(index) if self.messages[index].get("tool_calls") else None

    def _stop_before_question(self, index: int) -> int | None:
        """Return the end of a turn that the template writes differently where it is the last one: a question follows.

        Two questions in a row show what the template writes before the second one.
        """
        question = {"role": "user", "content": _PLACEHOLDER}
        upto = self.messages[: index + 1]
        one, two = (self.render([*upto, *[question] * number], False) for number in (1, 2))
        if one is None or two is None or (one.count(_PLACEHOLDER), two.count(_PLACEHOLDER)) != (1, 2):
            return None
        before, after = one.split(_PLACEHOLDER)
        between = two.split(_PLACEHOLDER)[1]
        header = between.removeprefix(after)
        turn = before.removesuffix(header)
        known = header and between.startswith(after) and before.endswith(header)
        return len(turn) if known and self.text.startswith(turn) else None

    def _around_placeholder(self, index: int) -> tuple[int, int] | None:
        content = self.messages[index].get("content") or ""
        replaced = {**self.messages[index], "content": _PLACEHOLDER}
        text = self.render([*self.messages[:index], replaced, *self.messages[index + 1 :]], False)
        if text is None or text.count(_PLACEHOLDER) != 1:
            return None
        before, after = text.split(_PLACEHOLDER)
        start, stop = len(before), len(self.text) - len(after)
        literal = self.text.startswith(before) and self.text.endswith(after) and start <= stop
        return (start, stop) if literal and self.text[start:stop] in content else None


@dataclass(frozen=True)
class ContentFrame:
    """A message's content, at ``start`` to ``stop`` of a text, and what is around it.

    Two turns with the same around them have their borders at the same places of it.
    """

    start: int
    stop: int
    around: Around

    def learn(self, known: Frames, borders: Span) -> None:
        """Note where the borders of this turn are, for other turns with the same around them."""
        lead, tail = self.start - borders[0], borders[1] - self.stop
        _, _, before, after = self.around
        if 0 <= lead <= len(before) and 0 <= tail <= len(after):
            known[self.around] = lead, tail

    def place(self, known: Frames) -> Span | None:
        """Return the borders that another turn with the same around it has, or None."""
        found = known.get(self.around)
        return (self.start - found[0], self.stop + found[1]) if found else None


class EndTokens:
    """Ends a turn with its end-of-turn token, which is one of the tokenizer's special tokens."""

    def __init__(self, specials: Collection[str]) -> None:
        """Prepare the search for the special tokens ``specials``."""
        longest_first = sorted(specials, key=len, reverse=True)
        special = "|".join(map(re.escape, longest_first)) or "(?!)"
        backwards = "|".join(re.escape(token[::-1]) for token in longest_first) or "(?!)"
        self._special = re.compile(special)
        self._next = re.compile(rf"\s*(?:{special})")
        # Read from the end, where the text ends in special tokens: one pass, however many there are.
        self._last = re.compile(rf"\s*(?:{backwards})(?:\s+(?:{backwards}))*")

    def close(self, text: str, start: int, stop: int) -> int:
        """Return the end of the turn whose content and layout are ``text[start:stop]``.

        White space behind a special token, and a special token behind that, is layout that the target never emits
        (Phi-3 ends a conversation with ``<|end|>``, a line break and ``<|endoftext|>``). A turn that does not end in
        a special token is ended by the one that follows it at once, if there is one: targets without an end-of-turn
        token stop by emitting the next header's first token.
        """
        if last := self._last.match(text[start:stop][::-1]):
            first = self._special.match(text, stop - last.end())
            assert first is not None
            return first.end()
        following = self._next.match(text, stop)
        return following.end() if following else stop
