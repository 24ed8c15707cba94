"""Megatron-Core keeps the contract of strategies, on gloo; without it there is nothing to test.

Each process of a test imports it, which takes seconds. So ``make test`` runs a few of them here, and compares real
runs with those of ``fsdp``, which keeps all of it (``tests/unit/strategy_megatron``). All: ``make test-megatron``.
"""

import os

import pytest

from spec_core import Strategy
from spec_testing import StrategySuite

MegatronStrategy = pytest.importorskip("spec_strategy_megatron.strategy").MegatronStrategy
if not MegatronStrategy.probe().ok:
    pytest.skip(MegatronStrategy.probe().reason, allow_module_level=True)


FEW = ("test_imports", "test_s2", "test_s6", "test_s7", "test_s10")


class TestMegatronStrategy(StrategySuite):
    @pytest.fixture(autouse=True)
    def chosen(self, request: pytest.FixtureRequest) -> None:
        if not request.node.name.startswith(FEW) and "SPEC_TEST_ALL_OF_MEGATRON" not in os.environ:
            pytest.skip("seconds for each process: make test-megatron")

    @pytest.fixture
    def strategy(self) -> type[Strategy]:
        return MegatronStrategy
