"""Copies of states arrive in order and late, and no step waits for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_core.records import FeatureSchema
from spec_kit.live_traffic import StateCopies, StateRows, StepBatch, state_copies
from spec_kit.live_traffic.served_states import StatesRange
from spec_kit.live_traffic.state_rows import PAGE_ROWS

SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=2, dtype="float32")
KEY, OTHER = f"{1:016x}", f"{2:016x}"


class Device:
    """Events of a device: each is reached when the device runs, or when the host waits for it."""

    def __init__(self) -> None:
        self.is_busy = True
        self.num_waits = 0

    def query(self) -> bool:
        return not self.is_busy

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_busy = False


@pytest.fixture
def device(monkeypatch) -> Device:
    device, copied = Device(), state_copies._copied
    monkeypatch.setattr(state_copies, "_copied", lambda *args: replace(copied(*args), ready=device))
    return device


@pytest.fixture
def copies() -> StateCopies:
    copies = StateCopies(StateRows(SCHEMA, 8 * PAGE_ROWS * SCHEMA.bytes_per_token(), age_s=10.0))
    copies.rows.begin(KEY)
    return copies


def step(copies: StateCopies, first: int, *keys: str) -> None:
    """Copy one row of each request."""
    count = len(keys)
    positions, token_ids = torch.full((count,), first), torch.arange(count)
    states = [torch.full((count, 2), layer + 10.0 * first) for layer in SCHEMA.layers]
    copies.add(StepBatch(keys, [1] * count, positions, token_ids), states)
    copies.write_arrived()


def asked(copies: StateCopies, rows: int, key: str = KEY) -> Any:
    answer = copies.answer(StatesRange(key=key, first=0, rows=rows).model_dump_json())
    return answer.get("left_out") or torch.frombuffer(bytearray(answer["piece"]), dtype=torch.float32)[rows:]


def test_a_request_ends_when_its_last_copy_has_arrived_and_nobody_waits(copies, device) -> None:
    step(copies, 0, "", KEY)
    copies.end(KEY)
    assert not copies.rows.has_ended(KEY)
    device.is_busy = False
    copies.write_arrived()
    assert copies.rows.has_ended(KEY)
    assert asked(copies, 1).tolist() == [1.0, 1.0, 3.0, 3.0]
    assert device.num_waits == 0


def test_whoever_reads_a_request_that_runs_waits_for_its_copies(copies, device) -> None:
    step(copies, 0, KEY)
    step(copies, 1, KEY)
    assert asked(copies, 2).tolist() == [1.0, 1.0, 3.0, 3.0, 11.0, 11.0, 13.0, 13.0]
    assert device.num_waits == 1
    copies.end(KEY)


def test_whoever_reads_a_request_that_has_ended_does_not_wait_for_others(copies, device) -> None:
    device.is_busy = False
    step(copies, 0, KEY)
    copies.end(KEY)
    copies.rows.begin(OTHER)
    device.is_busy = True
    step(copies, 0, OTHER)
    assert asked(copies, 1).tolist() == [1.0, 1.0, 3.0, 3.0]
    assert device.num_waits == 0


def test_a_request_is_left_out_when_too_many_copies_are_under_way(copies, device) -> None:
    for first in range(9):
        step(copies, first, KEY)
    device.is_busy = False
    assert asked(copies, 9) == "slow_copy"


def test_copies_that_have_arrived_before_a_step_leave_room_for_it(copies, device) -> None:
    for first in range(8):
        step(copies, first, KEY)
    device.is_busy = False
    step(copies, 8, KEY)
    assert not isinstance(asked(copies, 9), str)
    assert device.num_waits == 0


def test_rows_of_a_tree_of_guesses_are_left_out(copies) -> None:
    """A sibling's row would be kept if the sibling's token were the final token at the next position."""
    copies.rows.begin(OTHER)
    positions, token_ids = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([5, 6, 7, 5, 6])
    copies.add(StepBatch([KEY, OTHER], [3, 2], positions, token_ids), [torch.zeros(5, 2)] * 2)
    assert asked(copies, 2) == "error"
    assert not isinstance(asked(copies, 2, OTHER), str)


def test_requests_that_nobody_captures_are_not_copied(copies, device) -> None:
    step(copies, 0, "", OTHER)
    copies.end(OTHER)
    assert copies.answer("") == {"layers": [1, 3], "hidden_size": 2, "dtype": "float32"}
    assert asked(copies, 1) == "hole"
