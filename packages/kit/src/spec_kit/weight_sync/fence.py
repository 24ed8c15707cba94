"""Fences: numbers that order the trainers that push to a replica, without anybody's clock.

A replica remembers the fence of the last order that it has accepted, and refuses lower ones. A trainer asks for that
and takes the next: the upper bits count the trainers, so a fence is never further ahead than by the trainers that
there were. The lower bits are the trainer's own, drawn once: of two that ask at the same moment one has the higher
fence, the same one at every replica. A time in nanoseconds, which trainers took once, is an old fence like any other.
"""

from __future__ import annotations

import secrets

_OWN_BITS = 32


def own_bits() -> int:
    """Return random bits, by which two trainers that take a fence at the same moment differ."""
    return secrets.randbits(_OWN_BITS)


def fence_after(seen: int, own: int) -> int:
    """Return the fence of a trainer with these bits of its own that takes over after the fence ``seen``."""
    return (((seen >> _OWN_BITS) + 1) << _OWN_BITS) | own
