"""The launcher ray keeps the contract of launchers, on a cluster that is running already.

Each test starts two actors, a Python that imports Ray each: ``make test-ray`` runs all, ``make test-parts`` those of
what this launcher does itself.
"""

import os

import pytest

from spec_core import Launcher
from spec_testing import LauncherSuite

pytest.importorskip("ray")
RayLauncher = pytest.importorskip("spec_launcher_ray.launcher").RayLauncher
pytestmark = [
    pytest.mark.xdist_group("the undisturbed run"),  # that of test_ray_runs: one cluster for both
    pytest.mark.skipif("SPEC_TEST_ALL_OF_RAY" not in os.environ, reason="starts actors: make test-ray"),
]


class TestRayLauncher(LauncherSuite):
    @pytest.fixture
    def launcher_type(self, ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> type[Launcher]:
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
        return RayLauncher
