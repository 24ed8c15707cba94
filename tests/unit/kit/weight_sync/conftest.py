"""Fleets of replicas."""

import contextlib

import pytest

from spec_kit.weight_sync import Publisher, ReceiverReplica
from spec_testing.weight_stage import TARGET, odd_weights

from .fleet import LONG_S, Fleet, file_transports


@pytest.fixture
def fleet():
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, 3)


@pytest.fixture
def alone():
    """A fleet of one replica, which serves what an earlier publisher has left there."""
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, 1, fence=2)
        with Publisher(file_transports(), TARGET, fence=1) as earlier:
            earlier.add("0", ReceiverReplica(fleet.receivers[0])).result(LONG_S)
            assert earlier.publish(8, odd_weights(8)).result(LONG_S).committed
        yield fleet
