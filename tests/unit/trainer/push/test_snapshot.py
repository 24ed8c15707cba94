"""Copies of weights that a push sends while training goes on."""

import torch

from spec_trainer.push.snapshot import WeightSnapshot


def test_a_snapshot_takes_its_memory_once():
    snapshot = WeightSnapshot()
    addresses = []
    for value in (1.0, 2.0):
        snapshot.take({"weight": torch.full((3,), value)}.items())
        assert snapshot.read()["weight"].tolist() == [value] * 3
        addresses.append(snapshot.read()["weight"].data_ptr())
    assert addresses[0] == addresses[1]
