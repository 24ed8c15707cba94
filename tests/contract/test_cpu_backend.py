"""The reference backend keeps the contract that it stands for."""

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import Backend
from spec_testing import BackendSuite


class TestCpuBackend(BackendSuite):
    @pytest.fixture
    def backend(self) -> type[Backend]:
        return CpuBackend
