import random

from spec_kit.streams.free_list import FreeList


def test_the_lowest_hole_that_is_large_enough_is_taken():
    free_list = FreeList(100)
    assert [free_list.allocate(size) for size in (10, 20, 30)] == [(0, 10), (10, 30), (30, 60)]
    free_list.free(0, 10)
    assert free_list.allocate(20) == (60, 80)
    assert free_list.allocate(10) == (0, 10)
    assert free_list.allocate(21) is None


def test_ranges_that_touch_become_one():
    free_list = FreeList(40)
    for _ in range(4):
        free_list.allocate(10)
    assert free_list.free(0, 10) == (0, 10)
    assert free_list.free(20, 30) == (20, 30)
    assert free_list.free(10, 20) == (0, 30)
    assert free_list.free(30, 40) == (0, 40)


def test_what_no_hole_can_hold_is_scattered_over_several():
    free_list = FreeList(40)
    for _ in range(4):
        free_list.allocate(10)
    free_list.free(0, 10)
    free_list.free(20, 30)
    assert free_list.allocate_scattered(21) is None
    assert free_list.allocate_scattered(15) == [(0, 10), (20, 25)]
    assert free_list.allocate_scattered(5) == [(25, 30)]


def test_scattered_ranges_never_overlap_and_always_fit_by_bytes():
    rng, free_list, size = random.Random(0), FreeList(1000), 1000
    taken: list[list[tuple[int, int]]] = []
    for _ in range(500):
        wanted = rng.randrange(1, 200)
        used = sum(stop - start for ranges in taken for start, stop in ranges)
        if used + wanted <= size:
            ranges = free_list.allocate_scattered(wanted)
            assert ranges is not None
            assert sum(stop - start for start, stop in ranges) == wanted
            taken.append(ranges)
        else:
            for start, stop in taken.pop(rng.randrange(len(taken))):
                free_list.free(start, stop)
        spots = [spot for ranges in taken for start, stop in ranges for spot in range(start, stop)]
        assert len(spots) == len(set(spots))
