"""EndTokens finds the end-of-turn token of an answer."""

from __future__ import annotations

import re
from collections.abc import Collection


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

    def close(self, text: str, start: int, stop: int, usual: str = "") -> int:
        """Return the end of the text that the target emits in the turn ``text[start:stop]``.

        White space after a special token, and a special token after that, is layout that the target never emits
        (Phi-3 ends a conversation with ``<|end|>``, a line break and ``<|endoftext|>``). If a turn does not end in a
        special token, it ends with the special token that follows it directly, if any: targets without an
        end-of-turn token stop by emitting the next header's first token. ``usual``: the token that ends an answer of
        text, which may come after other special tokens.
        """
        if last := self._last.match(text[start:stop][::-1]):
            if usual and (at := text.find(usual, stop - last.end(), stop)) >= 0:
                return at + len(usual)
            first = self._special.match(text, stop - last.end())
            assert first is not None
            return first.end()
        return stop + len(self.opening(text[stop:]))

    def opening(self, text: str) -> str:
        """Return the special token with which ``text`` begins, and the white space before it; or ""."""
        following = self._next.match(text)
        return following[0] if following else ""

    def ends(self, text: str) -> bool:
        """Return whether ``text`` ends with a special token, if there are any."""
        return self._last.match(text[::-1]) is not None

    def other_text(self, text: str) -> str:
        """Return the text without special tokens, and without white space at both ends."""
        return self._special.sub("", text).strip()
