"""Find assistant turns in conversations, for chat templates without ``{% generation %}`` blocks.

A turn begins at the end of the generation prompt and ends with its end-of-turn token. To find a border (a turn's
first or last character), the conversation up to it is rendered. The border is valid only if this rendering is a
prefix of the whole rendering. Some templates fail this test, because they render a turn differently once other
turns follow it: they drop reasoning from earlier turns, or use another end-of-turn token. For them, the turn's
content is replaced by a placeholder. The text around the placeholder must then occur, literally, around the
content. Nothing is guessed: a border that neither way confirms is None.

Most turns are alike, which saves renderings. All contents are replaced by placeholders in one rendering. If the
template writes the same text around two contents, their turns have the same borders relative to the content. The
second content may also be from a plain example conversation (``usual``).
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
"""(messages, with generation prompt) -> text, or None if the template rejects the messages."""

# Plain ASCII letters: no template trims or escapes them, no text contains them by accident.
_PLACEHOLDER = "QPLACEHOLDERQXJZKVWQ"
_NUMBERED = re.compile(rf"{_PLACEHOLDER}(\d+)Q")
_EMPTY_THOUGHT_AT_END = re.compile(r"<think>\s*</think>\s*\Z")
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

_FEW = 1
"""Up to this number of turns, each turn is searched alone, with two renderings of the messages before it."""
_MOST = 200
"""Largest number of turns of one conversation that are searched alone; the time is quadratic in the conversation's
length."""

Span = tuple[int, int]
Around = tuple[str, str, str, str]
"""Roles of the previous and the next message, and the text that the template writes before and after a content."""
Frames = dict[Around, Span]
"""Text around a content -> number of the turn's characters before the content, and after the content."""


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant turns of one conversation; ``text`` is the rendering of the whole conversation."""

    messages: Sequence[Message]
    text: str
    render: Render
    has_prompt: bool
    """Whether the template has generation prompts. If not, only a placeholder shows where an answer begins."""
    end_tokens: EndTokens = field(repr=False)
    usual: Frames = field(default_factory=Frames, repr=False)
    """Frames that are known from example conversations with the same template."""

    def spans(self, turns: Sequence[int]) -> Iterator[Span | None]:
        """Yield the span that the assistant emits (content and end of turn) for each index in ``turns``.

        If a span is not certain, yield None for it and stop.
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
        """Yield the frames (items of ``Frames``) of the turns at the message indices ``turns``.

        Turns whose borders are not certain yield nothing.
        """
        for index, frame in self._frames().items():
            known: Frames = {}
            if index in turns and (borders := self._borders(index)):
                frame.learn(known, borders)
            yield from known.items()

    def _borders(self, index: int) -> Span | None:
        """Return the (start, stop) of turn ``index`` in the text; None if it is not certain."""
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
        """Return the ContentFrame of each message, by message index.

        A ContentFrame says where the message's content is in the text. Tool messages are left out if the
        template changes their contents.
        """
        spoken = {message["role"] for message in self.messages}
        return self._framed(spoken) or (self._framed(spoken - {"tool"}) if "tool" in spoken else {})

    def _framed(self, roles: Collection[str]) -> dict[int, ContentFrame]:
        """Return the ContentFrames of all messages with one of ``roles``, by message index.

        They are found in one rendering in which placeholders replace the contents. The result is empty unless
        that rendering, with the contents put back, equals the text. An empty content gets no placeholder,
        because templates treat it differently, and neither does a content with images.
        """
        numbered = [
            {**message, "content": f"{_PLACEHOLDER}{index}Q"}
            if isinstance(content := message.get("content"), str) and content and message["role"] in roles
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
        # With thinking off, the prompt has an empty thought. The text has none there, or the row's own.
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
        """Return the end of a turn that the template renders differently if the turn is the last message.

        The turn is rendered once with one user message after it, and once with two. The two renderings show
        which text belongs to the header of a user message, and so where the turn ends. Return None if this is
        not certain.
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
    """A message's content, ``text[start:stop]``, and the text that the template writes around it.

    Two turns with the same text around their contents begin and end at the same distances from their contents.
    """

    start: int
    stop: int
    around: Around

    def learn(self, known: Frames, borders: Span) -> None:
        """Store in ``known`` how many characters this turn has before and after its content.

        The key is ``around``, the text on both sides of the content, by which ``place`` finds where other turns
        begin and end. ``borders``: where this turn begins and ends in the rendered conversation.
        """
        lead, tail = self.start - borders[0], borders[1] - self.stop
        _, _, before, after = self.around
        if 0 <= lead <= len(before) and 0 <= tail <= len(after):
            known[self.around] = lead, tail

    def place(self, known: Frames) -> Span | None:
        """Return where this turn begins and ends in the text; None if ``known`` has no similar turn.

        A similar turn has the same text around its content, so it begins and ends at the same distances from
        its content.
        """
        found = known.get(self.around)
        return (self.start - found[0], self.stop + found[1]) if found else None


class EndTokens:
    """Finds a turn's end-of-turn token, which is one of the tokenizer's special tokens."""

    def __init__(self, specials: Collection[str]) -> None:
        """Prepare to find the special tokens ``specials`` in texts."""
        longest_first = sorted(specials, key=len, reverse=True)
        special = "|".join(map(re.escape, longest_first)) or "(?!)"
        backwards = "|".join(re.escape(token[::-1]) for token in longest_first) or "(?!)"
        self._special = re.compile(special)
        self._next = re.compile(rf"\s*(?:{special})")
        # Read from the end, where the text ends in special tokens: one pass, however many there are.
        self._last = re.compile(rf"\s*(?:{backwards})(?:\s+(?:{backwards}))*")

    def close(self, text: str, start: int, stop: int) -> int:
        """Return the end of the text that the target emits in the turn ``text[start:stop]``.

        White space after a special token, and a special token after that, is layout that the target never emits
        (Phi-3 ends a conversation with ``<|end|>``, a line break and ``<|endoftext|>``). If a turn does not end in a
        special token, it ends with the special token that follows it directly, if any: targets without an
        end-of-turn token stop by emitting the next header's first token.
        """
        if last := self._last.match(text[start:stop][::-1]):
            first = self._special.match(text, stop - last.end())
            assert first is not None
            return first.end()
        following = self._next.match(text, stop)
        return following.end() if following else stop
