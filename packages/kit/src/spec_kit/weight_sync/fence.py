"""Fences are numbers by which a replica accepts only the latest of several trainers, without clocks.

A replica stores the fence of the last update that it has accepted, and refuses updates with a lower fence. A new
trainer reads the stored fence and uses a higher one. The upper bits count the trainers. The lower 32 bits are
random bits that a trainer draws once: if two trainers read the same fence at the same time, one of them has the
higher fence at every replica. Older trainers used a time in nanoseconds, which is a valid fence, too.
"""

from __future__ import annotations

import secrets

_OWN_BITS = 32


def random_bits() -> int:
    """Return 32 random bits; by them two trainers that read the same fence choose different next fences."""
    return secrets.randbits(_OWN_BITS)


def fence_after(seen: int, own: int) -> int:
    """Return the fence of a trainer that takes over after the fence ``seen``. ``own``: its random bits."""
    return (((seen >> _OWN_BITS) + 1) << _OWN_BITS) | own
