"""A card of its own for each process of a test."""

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

NUM_CARDS = 4


@cache
def free_card() -> int:
    """The first card that no sibling process has taken; it is this process's until it ends."""
    folder = Path(tempfile.gettempdir()) / f"rig-cards-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    for card in range(NUM_CARDS):
        descriptor = os.open(folder / str(card), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return card
    raise AssertionError(f"more than {NUM_CARDS} processes")
