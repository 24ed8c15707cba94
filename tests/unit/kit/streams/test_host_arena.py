"""The arena of host memory that samples lie in."""

import mmap
import os
import random
from pathlib import Path

import pytest

from spec_core.errors import RunError
from spec_kit.streams.shared_memory import ALIGNMENT, Arena
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_testing.processes import Fault, Rank, watch_ranks

from .small_samples import LONG_S, SCHEMA, WINDOW, connect, sample


def test_tensors_are_aligned_and_read_in_place(receiver):
    with connect(receiver) as sender:
        for number in range(3):
            sender.send(sample(number, 3 + number), LONG_S)
        for _ in range(3):
            got = receiver.receive(LONG_S)
            assert got.input_ids.data_ptr() % ALIGNMENT == 0
            assert got.hidden_TNH.data_ptr() % ALIGNMENT == 0
            assert got.hidden_TNH.untyped_storage().nbytes() > WINDOW  # the arena itself


def die_in_the_middle(me: Rank, address: Path) -> str | None:
    if me.rank == 0:
        with SharedMemoryTransport().listen(SCHEMA, WINDOW) as receiver:
            address.write_text(receiver.address)
            me.publish(receiver.address)
            me.receive()
            held = receiver.receive(LONG_S)
            me.reach("fault")
            del held
        return None
    sender = SharedMemoryTransport().connect(me.receive(), SCHEMA, LONG_S)
    sender.send(sample(), LONG_S)
    me.publish("sent")
    me.reach("fault")
    sender.close()
    return None


def test_processes_killed_with_minus_9_leave_nothing_on_the_host(tmp_path):
    """No name in /dev/shm at any time, no socket in the abstract namespace afterwards."""
    address = tmp_path / "address"
    faults = {(0, "fault"): Fault.KILL, (1, "fault"): Fault.KILL}
    watch_ranks(die_in_the_middle, 2, address, faults=faults)
    name = address.read_text().split(":")[1]
    assert name.startswith("spec-")
    assert name not in Path("/proc/net/unix").read_text()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("spec")]


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.descriptor).st_blocks * 512


def test_the_arena_always_has_room_for_what_fits_by_bytes():
    """Sizes 64 B to 64 KiB, allocated and freed at random up to the brim: no hole is ever missing."""
    window, rng = 1 << 20, random.Random(0)
    arena = Arena(window)
    live: dict[int, int] = {}
    for _ in range(5_000):
        size = ALIGNMENT << rng.randrange(11)
        if sum(live.values()) + size <= window:
            offset = arena.allocate(size)
            assert offset is not None
            assert all(offset + size <= start or start + held <= offset for start, held in live.items())
            live[offset] = size
        else:
            victim = rng.choice(list(live))
            arena.free(victim)
            del live[victim]
    for offset in live:
        arena.free(offset)
    assert arena.allocate(arena.size) == 0
    arena.close()


def test_pages_beyond_the_window_are_given_back_and_those_within_stay_warm():
    window = 64 * mmap.PAGESIZE
    arena = Arena(window)
    blocks = [arena.allocate(window // 2) for _ in range(6)]
    arena.bytes[: 3 * window] = 1
    assert resident_bytes(arena) == 3 * window
    for offset in blocks[::2] + blocks[1::2]:
        arena.free(offset)
    assert resident_bytes(arena) == window
    arena.close()


def test_the_arena_cannot_be_shrunk_by_a_peer():
    arena = Arena(WINDOW)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)
    arena.close()


def test_a_limit_on_the_size_of_files_is_told_with_what_to_do(limit_files) -> None:
    limit_files(WINDOW)
    with pytest.raises(RunError, match=r"File too large; raise .*ulimit -f.* placement.window_bytes=65536"):
        Arena(WINDOW)
