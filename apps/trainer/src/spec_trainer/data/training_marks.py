"""Read the marks by which a conversation says that some of its answers are not to be trained.

They are fields of messages: ``weight`` (OpenAI), ``train`` (Axolotl), ``trainable``, ``loss`` (ms-swift); or a list
``loss_mask`` beside the messages, with a value for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_core.wording import counted, shown
from spec_trainer.data.errors import BadRow

MARKS = ("weight", "train", "trainable", "loss")
"""Fields of a message that say whether it is trained; chat templates do not get them."""
_PARTS = ("train_detail", "training_detail")
"""Fields of Axolotl that mark parts of a message's text."""


def untrained_messages(turns: Sequence[Mapping[str, Any]], mask: object) -> frozenset[int]:
    """Return the indices of the messages that are marked as not to be trained.

    ``mask``: the row's ``loss_mask``, if it has one. Raise BadRow for a mark that is neither yes nor no.
    """
    if mask is None:
        mask = [True] * len(turns)
    if not isinstance(mask, list) or len(mask) != len(turns):
        given = counted(len(mask), "value") if isinstance(mask, list) else shown(mask)
        expected = f"a value for each of {counted(len(turns), 'message')}"
        raise BadRow("bad training mark", f"loss_mask is {given}, expected {expected}")
    return frozenset(
        index
        for index, (turn, value) in enumerate(zip(turns, mask, strict=True))
        if not all([_is_yes(f"loss_mask[{index}]", value), *_own_marks(index, turn)])
    )


def _own_marks(index: int, turn: Mapping[str, Any]) -> list[bool]:
    for key in _PARTS:
        if turn.get(key) is not None:
            raise BadRow(
                "bad training mark",
                f"message {index + 1} has {key}, and parts of an answer cannot be left out; leave out all of it by "
                "weight: 0",
            )
    return [_is_yes(f"{key} of message {index + 1}", turn[key]) for key in MARKS if turn.get(key) is not None]


def _is_yes(what: str, value: object) -> bool:
    """Return whether a mark is 1 or true; raise BadRow unless it is that, 0 or false."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow(
            "bad training mark", f"{what} is {shown(value)}, expected 1 (trained) or 0 (context only)"
        )
    return bool(value)
