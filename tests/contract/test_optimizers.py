"""The optimizers keep their contract."""

from typing import ClassVar

import pytest

from spec_core import Optimizer
from spec_optimizers.adamw import AdamWOptimizer
from spec_optimizers.muon import MuonOptimizer
from spec_testing import OptimizerSuite


class TestAdamW(OptimizerSuite):
    options: ClassVar[dict[str, object]] = {"weight_decay": 0.1}

    @pytest.fixture
    def optimizer(self) -> type[Optimizer]:
        return AdamWOptimizer


class TestMuon(OptimizerSuite):
    options: ClassVar[dict[str, object]] = {"weight_decay": 0.1, "matrix_rate": 2.0}

    @pytest.fixture
    def optimizer(self) -> type[Optimizer]:
        return MuonOptimizer
