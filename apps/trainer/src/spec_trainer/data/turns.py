"""Where an assistant turn lies in a rendered conversation, for chat templates that do not mark it.

A turn begins where the generation prompt ends and ends with its end-of-turn token. Both borders come from
rendering the conversation up to there, and count only if that rendering is literally the beginning of the whole
one. Templates that render a turn differently once others follow it (reasoning that is dropped from earlier turns,
another end-of-turn token) fail that test; then the turn's content is replaced by a placeholder, and what the
template put around the placeholder must be found, literally, around the content. Nothing is guessed: a border
that neither way confirms is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Message = dict[str, Any]
Render = Callable[["Sequence[Message]", bool], "str | None"]
"""(messages, with generation prompt) -> text, or None where the template refuses them."""

# Plain ASCII letters: no template trims or escapes them, no text contains them by accident.
_PLACEHOLDER = "QPLACEHOLDERQXJZKVWQ"


@dataclass(frozen=True)
class TurnFinder:
    """Assistant turns of one conversation; ``text`` is its whole rendering."""

    messages: Sequence[Message]
    text: str
    render: Render
    has_prompt: bool
    """The template knows generation prompts. Without, what precedes an answer is known by its placeholder only."""
    end_tokens: EndTokens = field(repr=False)

    def span(self, index: int) -> tuple[int, int] | None:
        """Characters that the assistant emits in message ``index``: content and end of turn, without the header."""
        start, stop = self._start(index), self._stop(index)
        if start is None or stop is None:
            content = self._around_placeholder(index)
            if content is None:
                return None
            start = content[0] if start is None else start
            stop = content[1] if stop is None else stop
        return (start, self.end_tokens.close(self.text, start, stop)) if start <= stop else None

    def _start(self, index: int) -> int | None:
        before = self.render(self.messages[:index], True) if self.has_prompt and index > 0 else None
        return len(before) if before is not None and self.text.startswith(before) else None

    def _stop(self, index: int) -> int | None:
        if not self.has_prompt:
            return None  # for all that is known, the rendering goes on with the header of the next answer
        upto = (
            self.text if index == len(self.messages) - 1 else self.render(self.messages[: index + 1], False)
        )
        return len(upto) if upto is not None and self.text.startswith(upto) else None

    def _around_placeholder(self, index: int) -> tuple[int, int] | None:
        content = self.messages[index].get("content")
        replaced = {**self.messages[index], "content": _PLACEHOLDER}
        text = self.render([*self.messages[:index], replaced, *self.messages[index + 1 :]], False)
        if content is None or text is None or text.count(_PLACEHOLDER) != 1:
            return None
        before, after = text.split(_PLACEHOLDER)
        start, stop = len(before), len(self.text) - len(after)
        literal = self.text.startswith(before) and self.text.endswith(after) and start <= stop
        return (start, stop) if literal and self.text[start:stop] in content else None


class EndTokens:
    """Ends a turn with its end-of-turn token, which is one of the tokenizer's special tokens."""

    def __init__(self, specials: Collection[str]) -> None:
        longest_first = sorted(specials, key=len, reverse=True)
        special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._last = re.compile(rf"({special})(?:\s+(?:{special}))*\s*\Z")
        self._next = re.compile(rf"\s*(?:{special})")

    def close(self, text: str, start: int, stop: int) -> int:
        """The end of the turn whose content and layout are ``text[start:stop]``.

        White space behind a special token, and a special token behind that, is layout that the target never emits
        (Phi-3 ends a conversation with ``<|end|>``, a line break and ``<|endoftext|>``). A turn that does not end in
        a special token is ended by the one that follows it at once, if there is one: targets without an end-of-turn
        token stop by emitting the next header's first token.
        """
        if last := self._last.search(text, start, stop):
            return last.end(1)
        following = self._next.match(text, stop)
        return following.end() if following else stop
