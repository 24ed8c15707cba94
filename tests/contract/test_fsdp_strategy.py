"""FSDP2 keeps the contract of strategies, on gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_testing import StrategySuite

if TYPE_CHECKING:
    from spec_core import Strategy


class TestFsdpStrategy(StrategySuite):
    @pytest.fixture
    def strategy(self) -> type[Strategy]:
        return FsdpStrategy
