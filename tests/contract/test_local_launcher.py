"""The local launcher keeps the contract of launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spec_launcher_local.launcher import LocalLauncher
from spec_testing import LauncherSuite

if TYPE_CHECKING:
    from spec_core import Launcher


class TestLocalLauncher(LauncherSuite):
    @pytest.fixture
    def launcher_type(self) -> type[Launcher]:
        return LocalLauncher
