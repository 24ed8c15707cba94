"""The local launcher keeps the contract of launchers."""

import pytest

from spec_core import Launcher
from spec_launcher_local.launcher import LocalLauncher
from spec_testing import LauncherSuite


class TestLocalLauncher(LauncherSuite):
    @pytest.fixture
    def launcher_type(self) -> type[Launcher]:
        return LocalLauncher
