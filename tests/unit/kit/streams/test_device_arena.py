"""DeviceArena: room in pieces, and who still reads it."""

import pytest
import torch

from spec_core.records import FeatureSample, FeatureSchema
from spec_kit.streams.device_arena import (
    MAX_PIECES,
    DeviceArena,
    GrantInfo,
    arena_bytes,
    copy_sample,
    staged_copy,
)
from spec_kit.streams.wire import SampleLayout

SCHEMA = FeatureSchema(layers=(1, 2), hidden_size=4, dtype="float32")
LAYOUT = SampleLayout(SCHEMA)


class Reader:
    """An event that has come when the test says so."""

    def __init__(self) -> None:
        self.through = False

    def query(self) -> bool:
        return self.through


@pytest.fixture
def arena():
    return DeviceArena(torch.zeros(8 * LAYOUT.block_bytes(10), dtype=torch.uint8), LAYOUT)


def sample(num_tokens: int) -> FeatureSample:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, 1000, (num_tokens,), generator=generator)
    return FeatureSample(
        request_id=1, input_ids=ids, hidden_TNH=torch.randn(SCHEMA.shape(num_tokens), generator=generator)
    )


def write(arena: DeviceArena, pieces, sent: FeatureSample) -> None:
    aside = staged_copy(sent, LAYOUT, torch.device("cpu"))
    for part, source in zip(arena.parts(pieces), aside.split([b - a for a, b in pieces]), strict=True):
        part.copy_(source)


def test_a_window_of_samples_of_any_length_has_room():
    for num_tokens in (1, 3, 17, 100):
        window = 100 * LAYOUT.sample_bytes(num_tokens)
        arena = DeviceArena(torch.empty(arena_bytes(LAYOUT, window), dtype=torch.uint8), LAYOUT)
        assert all(arena.allocate(num_tokens) is not None for _ in range(100))


def test_a_sample_that_finds_no_hole_is_scattered_and_read_as_it_was(arena):
    taken = [arena.allocate(10) for _ in range(8)]
    assert arena.allocate(1) is None
    for index in (1, 3, 6):
        arena.free(taken[index])
    pieces = arena.allocate(30)
    assert len(pieces) == 3
    sent = sample(30)
    write(arena, pieces, sent)
    ids, hidden = arena.view(pieces, 30)
    assert torch.equal(ids, sent.input_ids)
    assert torch.equal(hidden, sent.hidden_TNH)


def test_a_sample_in_one_piece_is_read_in_place(arena):
    arena.allocate(10)
    pieces = arena.allocate(20)
    sent = sample(20)
    write(arena, pieces, sent)
    _, hidden = arena.view(pieces, 20)
    arena.parts(pieces)[0].zero_()
    assert not hidden.any()


def test_a_sample_of_no_tokens_needs_no_room(arena):
    assert arena.allocate(80) is not None
    assert arena.allocate(0) == []
    ids, hidden = arena.view([], 0)
    assert (ids.numel(), hidden.numel()) == (0, 0)


def test_room_that_is_given_back_names_its_readers_until_they_are_through(arena):
    first, second = arena.allocate(10), arena.allocate(10)
    one, two = Reader(), Reader()
    arena.free(first, one)
    arena.free(second, two)
    again = arena.allocate(15)
    assert arena.readers(again) == [one, two]
    one.through = True
    assert arena.readers(again) == [two]
    assert arena.readers([(10 * LAYOUT.block_bytes(10), 11 * LAYOUT.block_bytes(10))]) == []


def test_no_sample_lies_in_more_pieces_than_a_grant_can_name():
    unit = LAYOUT.block_bytes(1)
    arena = DeviceArena(torch.empty(2 * (MAX_PIECES + 1) * unit, dtype=torch.uint8), LAYOUT)
    taken = [arena.allocate(1) for _ in range(2 * (MAX_PIECES + 1))]
    for pieces in taken[::2]:
        arena.free(pieces)
    num_tokens = max(n for n in range(20_000) if LAYOUT.block_bytes(n) <= (MAX_PIECES + 1) * unit)
    assert arena.allocate(num_tokens) is None
    smaller = max(n for n in range(20_000) if LAYOUT.block_bytes(n) <= MAX_PIECES * unit)
    assert len(arena.allocate(smaller)) <= MAX_PIECES


def test_the_note_of_a_grant_survives_the_wire():
    note = GrantInfo([(0, 64), (128, 4096)], bytes(range(64)), True)
    assert GrantInfo.decode(note.encode()) == note
    longest = GrantInfo([(1 << 40, 1 << 41)] * MAX_PIECES)
    assert len(longest.encode()) < 1 << 16


def test_strided_tensors_are_laid_out_as_they_are():
    sent = sample(12)
    strided = FeatureSample(
        request_id=1,
        input_ids=sent.input_ids[::3],
        hidden_TNH=sent.hidden_TNH.transpose(1, 2)[::3].transpose(1, 2),
    )
    tensors = (torch.empty(4, dtype=torch.int64), torch.empty(SCHEMA.shape(4)))
    copy_sample(strided, tensors)
    assert torch.equal(tensors[0], sent.input_ids[::3])
    assert torch.equal(tensors[1], sent.hidden_TNH[::3])
