"""FSDP2 keeps the contract of strategies, on gloo."""

import pytest

from spec_core import Strategy
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_testing import StrategySuite


class TestFsdpStrategy(StrategySuite):
    @pytest.fixture
    def strategy(self) -> type[Strategy]:
        return FsdpStrategy
