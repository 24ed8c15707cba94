"""The reference backend keeps the contract that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_testing import BackendSuite

if TYPE_CHECKING:
    from spec_core import Backend


class TestCpuBackend(BackendSuite):
    @pytest.fixture
    def backend(self) -> type[Backend]:
        return CpuBackend
