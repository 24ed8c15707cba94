"""The launcher ray keeps the contract of launchers, on a cluster that is running already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spec_core.testing import LauncherSuite

if TYPE_CHECKING:
    from spec_core import Launcher

pytest.importorskip("ray")
RayLauncher = pytest.importorskip("spec_launcher_ray.launcher").RayLauncher
pytestmark = pytest.mark.xdist_group("ray")


class TestRayLauncher(LauncherSuite):
    @pytest.fixture
    def launcher_type(self, ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> type[Launcher]:
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
        return RayLauncher
