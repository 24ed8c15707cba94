"""AscendBackend keeps the contract on the rig."""

import pytest

from spec_backend_ascend.backend import AscendBackend
from spec_testing import BackendSuite


class TestAscendBackend(BackendSuite):
    sdk_modules = ("torch_npu",)

    @pytest.fixture
    def backend(self):
        return AscendBackend
