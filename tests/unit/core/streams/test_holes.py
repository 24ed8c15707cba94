from __future__ import annotations

import random

from spec_core.streams.holes import Holes


def test_the_lowest_hole_that_is_large_enough_is_taken():
    holes = Holes(100)
    assert [holes.take(size) for size in (10, 20, 30)] == [(0, 10), (10, 30), (30, 60)]
    holes.give(0, 10)
    assert holes.take(20) == (60, 80)
    assert holes.take(10) == (0, 10)
    assert holes.take(21) is None


def test_ranges_that_touch_become_one():
    holes = Holes(40)
    for _ in range(4):
        holes.take(10)
    assert holes.give(0, 10) == (0, 10)
    assert holes.give(20, 30) == (20, 30)
    assert holes.give(10, 20) == (0, 30)
    assert holes.give(30, 40) == (0, 40)


def test_what_no_hole_can_hold_is_scattered_over_several():
    holes = Holes(40)
    for _ in range(4):
        holes.take(10)
    holes.give(0, 10)
    holes.give(20, 30)
    assert holes.take_scattered(21) is None
    assert holes.take_scattered(15) == [(0, 10), (20, 25)]
    assert holes.take_scattered(5) == [(25, 30)]


def test_scattered_ranges_never_overlap_and_always_fit_by_bytes():
    rng, holes, size = random.Random(0), Holes(1000), 1000
    taken: list[list[tuple[int, int]]] = []
    for _ in range(500):
        wanted = rng.randrange(1, 200)
        used = sum(stop - start for ranges in taken for start, stop in ranges)
        if used + wanted <= size:
            ranges = holes.take_scattered(wanted)
            assert ranges is not None
            assert sum(stop - start for start, stop in ranges) == wanted
            taken.append(ranges)
        else:
            for start, stop in taken.pop(rng.randrange(len(taken))):
                holes.give(start, stop)
        spots = [spot for ranges in taken for start, stop in ranges for spot in range(start, stop)]
        assert len(spots) == len(set(spots))
