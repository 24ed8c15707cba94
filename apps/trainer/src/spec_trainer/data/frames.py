"""Find alike turns of a plain conversation in one rendering, instead of two renderings for each turn.

All contents are replaced by placeholders. If the template writes the same text around two contents, their turns
begin and end at the same distances from their contents, and either both or none are in the whole conversation as
they were generated. So one turn of each kind is searched by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spec_trainer.data.layout import PLACEHOLDER, Message, Render

_NUMBERED = re.compile(rf"{PLACEHOLDER}(\d+)Q")

Span = tuple[int, int]
Surroundings = tuple[str, str, str, str]
"""Roles of the previous and the next message, and the text that the template writes before and after a content."""
KnownTurns = dict[Surroundings, Span | None]
"""Text around a content -> number of the turn's characters before the content, and after it; None if turns with this
text around them are not in the whole conversation as they were generated."""


@dataclass(frozen=True)
class ContentFrame:
    """A message's content, ``whole[start:stop]``, and the text that the template writes around it."""

    start: int
    stop: int
    around: Surroundings

    def distances(self, turn: Span) -> Span | None:
        """Return the distances of a turn's start and stop from the content; None if another content is between."""
        before = self.start - turn[0]
        after = turn[1] - self.stop
        inside = 0 <= before <= len(self.around[2]) and 0 <= after <= len(self.around[3])
        return (before, after) if inside else None

    def turn(self, known: KnownTurns) -> Span | None:
        """Return where this content's turn begins and ends; None if ``known`` has no turn like it."""
        distances = known.get(self.around)
        return (self.start - distances[0], self.stop + distances[1]) if distances else None


def frames_of(messages: Sequence[Message], whole: str, render: Render) -> dict[int, ContentFrame]:
    """Return the frames of the messages by index, if ``whole`` is a plain conversation; else an empty dict.

    A conversation is plain if its messages have only texts, and the template writes them as they are. An empty
    content has no frame, because templates treat it differently.
    """
    if not all(
        message.keys() == {"role", "content"} and isinstance(message["content"], str) for message in messages
    ):
        return {}
    text = render([_numbered(index, message) for index, message in enumerate(messages)], False)
    first, *rest = _NUMBERED.split(text or "")
    indices = list(map(int, rest[::2]))
    between = [first, *rest[1::2]]
    if indices != sorted(set(indices)) or not whole.startswith(first):
        return {}
    spoken = ["", *(message["role"] for message in messages), ""]
    frames: dict[int, ContentFrame] = {}
    position = len(first)
    for index, (before, after) in zip(indices, pairwise(between), strict=True):
        content = messages[index]["content"]
        written = next((c for c in (content, content.strip()) if whole.startswith(c + after, position)), None)
        if written is None:
            return {}
        around = spoken[index], spoken[index + 2], before, after
        frames[index] = ContentFrame(position, position + len(written), around)
        position += len(written) + len(after)
    return frames if position == len(whole) else {}


def _numbered(index: int, message: Message) -> Message:
    return {**message, "content": f"{PLACEHOLDER}{index}Q"} if message["content"] else message
