"""The reference process group keeps the contract that it is the reference for."""

from __future__ import annotations

import pytest

from spec_core.cpu.gloo_process_group import GlooProcessGroup
from spec_core.testing import ProcessGroupSuite


class TestGlooProcessGroup(ProcessGroupSuite):
    @pytest.fixture
    def build(self):
        return GlooProcessGroup

    @pytest.fixture
    def world_size(self):
        return 3
