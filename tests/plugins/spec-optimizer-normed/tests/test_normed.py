"""The conformance suite of optimizers on this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from spec_optimizer_normed.optimizer import NormedOptimizer

from spec_testing import OptimizerSuite

if TYPE_CHECKING:
    from spec_core import Optimizer


class TestNormedOptimizer(OptimizerSuite):
    @pytest.fixture
    def optimizer(self) -> type[Optimizer]:
        return NormedOptimizer
