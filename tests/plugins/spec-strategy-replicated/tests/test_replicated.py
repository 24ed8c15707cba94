"""The conformance suite of strategies on this one, with one copy of each share and with two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from spec_strategy_replicated.strategy import ReplicatedConfig, ReplicatedStrategy

from spec_core.errors import ConfigError
from spec_testing import StrategySuite

if TYPE_CHECKING:
    from spec_core import Strategy


class TestReplicatedStrategy(StrategySuite):
    @pytest.fixture
    def strategy(self) -> type[Strategy]:
        return ReplicatedStrategy


def test_copies_must_divide_the_processes() -> None:
    config = ReplicatedConfig(name="replicated", copies=2)
    assert [ReplicatedStrategy.data_parallel(config, rank, 4).rank for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"strategy.copies=2 does not divide train.ranks=3"):
        ReplicatedStrategy.data_parallel(config, 0, 3)
