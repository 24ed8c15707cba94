"""A stream has one owner at a time, and its closer gives it to the next one."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from spec_kit import OwnStream

DEVICE, OTHER = torch.device("meta", 0), torch.device("meta", 1)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The streams that were made, each with its device and priority."""
    made = []

    def new(device, priority):
        made.append((device, priority))
        return object()

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Stream=new))
    monkeypatch.setattr(OwnStream, "_spare", defaultdict(list))
    return made


def test_closed_stream_is_used_again(made):
    for _ in range(40):
        with OwnStream(DEVICE):
            pass
    assert made == [(DEVICE, 0)]


def test_open_streams_differ_also_after_one_was_closed_twice():
    first = OwnStream(DEVICE)
    first.close()
    first.close()
    assert len({OwnStream(DEVICE).stream, OwnStream(DEVICE).stream}) == 2


def test_each_device_and_priority_has_its_own(made):
    for device, priority in ((DEVICE, 0), (DEVICE, -1), (OTHER, 0)):
        OwnStream(device, priority).close()
    assert made == [(DEVICE, 0), (DEVICE, -1), (OTHER, 0)]
