"""The reference process group keeps the contract that it is the reference for."""

import time

import pytest
import torch

from spec_core.errors import PeerLost
from spec_kit.collectives.gloo_process_group import GlooProcessGroup
from spec_testing import ProcessGroupSuite
from spec_testing.process_group_ranks import LONG_S, joined
from spec_testing.processes import Fault, Rank, watch_ranks


class TestGlooProcessGroup(ProcessGroupSuite):
    @pytest.fixture
    def build(self):
        return GlooProcessGroup

    @pytest.fixture
    def world_size(self):
        return 3

    def test_a_rank_that_lost_a_peer_is_lost_to_the_others(self):
        """P6: rank 0 waits for the dead rank 2, rank 1 for rank 0; both learn of it long before the timeout."""
        outcomes = watch_ranks(wait_in_a_row, 3, faults={(2, "fault"): Fault.KILL})
        assert [outcome.trace for outcome in outcomes] == ["", "", ""]
        assert max(outcomes[0].value, outcomes[1].value) < LONG_S / 4


def wait_in_a_row(me: Rank) -> float:
    with joined(me) as rendezvous, GlooProcessGroup(rendezvous) as group:
        if me.rank == 2:
            time.sleep(0.2)
            me.reach("fault")
        started = time.monotonic()
        with pytest.raises(PeerLost):
            group.recv(torch.zeros(3), src=(me.rank + 2) % 3)
        elapsed = time.monotonic() - started
        me.publish("found out")
        me.receive()
        return elapsed
