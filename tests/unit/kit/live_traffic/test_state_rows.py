"""Rows of states are right or left out, by the cause; their memory is bounded."""

import random

import pytest
import torch

from spec_core.records import FeatureSchema
from spec_kit.live_traffic import STATES_ARGUMENT, StateRows, states_key
from spec_kit.live_traffic.served_states import MOST_STATE_ROWS, StatesRange
from spec_kit.live_traffic.state_rows import PAGE_ROWS

SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="bfloat16")
KEYS = [f"{number:016x}" for number in range(64)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rows_of(num_pages: int, clock: Clock | None = None) -> StateRows:
    num_bytes = num_pages * PAGE_ROWS * SCHEMA.bytes_per_token()
    return StateRows(SCHEMA, num_bytes, age_s=10.0, clock=clock or Clock())


def states(text: list[int], first: int, ids: list[int]) -> torch.Tensor:
    """States of a model that sums the tokens so far: a wrong token makes every row after it wrong."""
    sums = torch.tensor([sum(text[:first]) + sum(ids[: number + 1]) for number in range(len(ids))])
    return (sums % 251)[:, None, None].expand(len(ids), 2, 4).to(torch.bfloat16)


def step(rows: StateRows, key: str, text: list[int], first: int, ids: list[int]) -> None:
    rows.write(key, first, ids, states(text, first, ids))


def read(rows: StateRows, key: str, num_rows: int) -> tuple[list[int], torch.Tensor] | str:
    ids, found = bytearray(), bytearray()
    while len(ids) // 4 < num_rows:
        answer = rows.read(StatesRange(key=key, first=len(ids) // 4, rows=num_rows))
        if "left_out" in answer:
            return answer["left_out"]
        num = len(answer["piece"]) // (4 + SCHEMA.bytes_per_token())
        ids += answer["piece"][: 4 * num]
        found += answer["piece"][4 * num :]
    hidden_TNH = torch.frombuffer(found, dtype=torch.bfloat16).view(SCHEMA.shape(num_rows))
    return torch.frombuffer(ids, dtype=torch.int32).tolist(), hidden_TNH


def serve(rows: StateRows, key: str, text: list[int], num_prompt: int, draw: random.Random) -> None:
    """Run a request as a server does that speculates, in chunks, and preempts it now and then."""
    at, accepted = 0, num_prompt
    while at < len(text) - 1:
        if at and draw.random() < 0.1:
            at = draw.randrange(at + 1)  # it comes back; some of its tokens are still cached
        guesses = [
            token if draw.random() < 0.6 else token + 100
            for token in text[accepted : accepted + draw.randrange(4)]
        ]
        ids = [*text[at:accepted], *guesses][: draw.randrange(1, 40)]
        step(rows, key, text, at, ids)
        run = at + len(ids)
        if run < accepted:
            at = run
            continue
        right = 0
        while right < run - accepted and guesses[right] == text[accepted + right]:
            right += 1
        at, accepted = accepted + right, min(accepted + right + 1, len(text))


def test_rows_of_requests_that_share_the_memory_are_those_of_a_prefill() -> None:
    """Guesses are rejected, prompts come in chunks, and requests run at once and are preempted."""
    draw = random.Random(2)
    rows = rows_of(64)
    for turn in range(4):
        texts = [[draw.randrange(90) for _ in range(draw.randrange(8, 150))] for _ in range(10)]
        for number, text in enumerate(texts):
            rows.begin(KEYS[10 * turn + number])
            serve(rows, KEYS[10 * turn + number], text, 5, draw)
        for number, text in enumerate(texts):
            rows.end(KEYS[10 * turn + number])
            found = read(rows, KEYS[10 * turn + number], len(text) - 1)
            assert not isinstance(found, str)
            assert found[0] == text[:-1]
            assert torch.equal(found[1], states(text, 0, text[:-1]))
    assert rows.num_free == 64 * PAGE_ROWS


def test_a_request_with_a_hole_is_left_out_by_its_cause() -> None:
    rows, text = rows_of(8), list(range(50))
    for key in KEYS[:4]:
        rows.begin(key)
    step(rows, KEYS[0], text, 16, text[16:20])  # its first tokens were cached
    step(rows, KEYS[1], text, 0, text[:8])
    step(rows, KEYS[1], text, 10, text[10:12])  # preempted, and more is cached than it has run
    step(rows, KEYS[2], text, 0, text[:8])  # some tokens have no row yet
    rows.leave_out([KEYS[3], "unknown"], "slow_copy")
    assert not rows.wants(KEYS[0])
    assert rows.wants(KEYS[2])
    assert [read(rows, key, 12) for key in KEYS[:5]] == [
        "prefix_hit", "hole", "hole", "slow_copy", "states_dropped",
    ]  # fmt: skip
    assert rows.num_free == 8 * PAGE_ROWS


def test_rows_of_a_rejected_guess_that_nothing_overwrites_carry_its_token() -> None:
    rows, text = rows_of(1), [1, 2, 3, 4]
    rows.begin(KEYS[0])
    step(rows, KEYS[0], text, 0, [1, 2, 9, 4])
    found = read(rows, KEYS[0], 3)
    assert not isinstance(found, str)
    assert found[0] == [1, 2, 9]


def test_what_does_not_fit_is_left_out_and_ended_requests_go_first() -> None:
    rows, text = rows_of(2), list(range(PAGE_ROWS))
    for key in KEYS[:3]:
        rows.begin(key)
    step(rows, KEYS[0], text, 0, text)
    step(rows, KEYS[1], text, 0, text)
    step(rows, KEYS[2], text, 0, text)  # the first two are running
    rows.end(KEYS[0])
    rows.end(KEYS[2])
    rows.begin(KEYS[3])
    step(rows, KEYS[3], text, 0, text)
    assert read(rows, KEYS[0], PAGE_ROWS) == "states_dropped"
    assert read(rows, KEYS[2], PAGE_ROWS) == "no_room"
    for key in (KEYS[1], KEYS[3]):
        assert not isinstance(read(rows, key, PAGE_ROWS), str)
    assert rows.num_free == 2 * PAGE_ROWS


def test_ended_requests_expire_and_their_number_is_bounded(clock) -> None:
    rows, text = rows_of(4, clock), list(range(8))
    rows.begin(KEYS[0])
    step(rows, KEYS[0], text, 0, text)
    rows.end(KEYS[0])
    clock.now = 9.0
    rows.expire()
    assert rows.num_free == 3 * PAGE_ROWS
    clock.now = 10.0
    rows.expire()
    assert rows.num_free == 4 * PAGE_ROWS
    for number in range(5000):
        rows.begin(f"{number:016x}")
        rows.end(f"{number:016x}")
    assert read(rows, f"{0:016x}", 1) == "states_dropped"
    assert read(rows, f"{4999:016x}", 1) == "hole"


def test_a_second_request_of_a_key_takes_no_memory(clock) -> None:
    rows, text = rows_of(4, clock), list(range(8))
    assert rows.begin(KEYS[0])
    step(rows, KEYS[0], text, 0, text)
    assert not rows.begin(KEYS[0])
    rows.end(KEYS[0])
    assert not rows.begin(KEYS[0])
    step(rows, KEYS[0], text, 8, text)
    rows.end(KEYS[0])
    assert not isinstance(read(rows, KEYS[0], 8), str)
    assert rows.num_free == 4 * PAGE_ROWS


def test_a_request_that_is_read_while_it_runs_is_captured_no_longer() -> None:
    rows, text = rows_of(1), list(range(8))
    rows.begin(KEYS[0])
    step(rows, KEYS[0], text, 0, text)
    assert not isinstance(read(rows, KEYS[0], 8), str)
    step(rows, KEYS[0], text, 8, text)
    rows.end(KEYS[0])
    assert rows.num_free == PAGE_ROWS
    assert read(rows, KEYS[0], 8) == "states_dropped"


def test_a_text_beyond_the_longest_is_left_out() -> None:
    rows = rows_of(1 + MOST_STATE_ROWS // PAGE_ROWS)
    rows.begin(KEYS[0])
    num_rows = MOST_STATE_ROWS + 1
    rows.write(KEYS[0], 0, [1] * num_rows, torch.zeros(SCHEMA.shape(num_rows), dtype=torch.bfloat16))
    assert read(rows, KEYS[0], 1) == "too_long"


def test_only_a_key_of_this_project_marks_a_request() -> None:
    assert states_key({STATES_ARGUMENT: KEYS[0], "other": 1}) == KEYS[0]
    assert [states_key(one) for one in (None, {}, {STATES_ARGUMENT: 3}, "abc", [1])] == [None] * 5
