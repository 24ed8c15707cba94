"""Layout says what a chat template writes around answers, as example conversations show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from spec_trainer.data.end_of_turn import EndTokens

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str | None]
"""(messages, with generation prompt) -> text, or None if the template rejects the messages."""

# Plain ASCII letters: no template trims or escapes them, no text contains them by accident.
PLACEHOLDER = "QPLACEHOLDERQXJZKVWQ"
_QUESTION = {"role": "user", "content": "x"}
_REPLY = {"role": "user", "content": "QREPLYQXJZKVWQ"}
_ANSWER = {"role": "assistant", "content": PLACEHOLDER}
_CUT_TAG = re.compile(r"<[^<>]*\Z")
_CUT_TAG_BEFORE = re.compile(r"\A[^<>]*>")


@dataclass(frozen=True)
class Layout:
    """The text that a chat template writes around answers."""

    has_prompt: bool
    """Whether the template has generation prompts."""
    header: str
    """Text that the template writes between a question and an answer, such as ``<|im_start|>assistant``. If it has
    generation prompts, only as far as they have it too."""
    trailing: str
    """Text that the template writes after the end of the last turn, if it has no generation prompts. A template that
    never asks whether to write its prompt has it there."""

    end: str
    """The special token that the template writes after an answer to which the user replies, if there is one."""
    adds_text: bool = False
    """Whether the template writes text after the last answer that it does not write between an answer and the reply
    to it, besides special tokens. Most of these templates have the target judge the answers of others."""

    @classmethod
    def of(cls, render: Render, end_tokens: EndTokens) -> Layout:
        """Learn the layout of the template of ``render``."""
        layout = cls._around(render, end_tokens)
        last = (render([_QUESTION, _ANSWER], False) or "").partition(PLACEHOLDER)[2]
        replied = (render([_QUESTION, _ANSWER, _REPLY], False) or "").partition(PLACEHOLDER)[2]
        earlier = replied.partition(_REPLY["content"])[0] if _REPLY["content"] in replied else ""
        added = last.removesuffix(layout.trailing)[len(shared(last, earlier)) :]
        return replace(layout, adds_text=end_tokens.other_text(added) != "")

    @classmethod
    def _around(cls, render: Render, end_tokens: EndTokens) -> Layout:
        asked, prompted = render([_QUESTION], False), render([_QUESTION], True)
        answered = render([_QUESTION, _ANSWER], False) or ""
        replied = render([_QUESTION, _ANSWER, _QUESTION], False) or ""
        end = end_tokens.opening(replied.partition(PLACEHOLDER)[2]).lstrip()
        before, shown, _ = answered.partition(PLACEHOLDER)
        if asked is None or prompted is None or not shown or not before.startswith(asked):
            return cls(asked != prompted, "", "", end)
        if prompted == asked:
            return cls(False, before[len(asked) :], _trailing(asked, answered, end_tokens), end)
        return cls(True, shared(prompted, before)[len(asked) :], "", end)


def _trailing(asked: str, answered: str, end_tokens: EndTokens) -> str:
    """Return what a template writes after the end-of-turn token of any last message."""
    both = _CUT_TAG_BEFORE.sub("", _common(asked[::-1], answered[::-1])[::-1])
    return both[len(end_tokens.opening(both)) :]


def shared(text: str, other: str) -> str:
    """Return the longest common beginning of two texts, without a tag that it cuts (``<thi``)."""
    return _CUT_TAG.sub("", _common(text, other))


def _common(text: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return text[: sum(1 for _ in same)]
