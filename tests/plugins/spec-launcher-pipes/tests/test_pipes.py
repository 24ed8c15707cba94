"""The launcher keeps the contract of launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from spec_launcher_pipes.launcher import PipesLauncher

from spec_testing import LauncherSuite

if TYPE_CHECKING:
    from spec_core import Launcher


class TestLauncher(LauncherSuite):
    @pytest.fixture
    def launcher_type(self) -> type[Launcher]:
        return PipesLauncher
