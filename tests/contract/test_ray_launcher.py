"""The launcher ray keeps the contract of launchers, on a cluster that is running already.

Each test starts two actors, a Python that imports Ray each. So ``make test`` runs those of what this launcher does
itself; the rest, and what it has from ``spec_processes``, as ``local`` has, is left to ``make test-ray``.
"""

import os

import pytest

from spec_core import Launcher
from spec_testing import LauncherSuite

pytest.importorskip("ray")
RayLauncher = pytest.importorskip("spec_launcher_ray.launcher").RayLauncher
pytestmark = pytest.mark.xdist_group("the undisturbed run")  # that of test_ray_runs: one cluster for both

OWN = {
    "test_imports_without_torch",
    "test_l1_nothing_is_started_before_start",
    "test_l2_a_worker_is_a_process_with_its_arguments_and_environment",
    "test_l8_a_killed_launcher_leaves_nothing",
}


class TestRayLauncher(LauncherSuite):
    @pytest.fixture(autouse=True)
    def chosen(self, request: pytest.FixtureRequest) -> None:
        if request.node.name not in OWN and "SPEC_TEST_ALL_OF_RAY" not in os.environ:
            pytest.skip("shared with local: make test-ray")

    @pytest.fixture
    def launcher_type(self, ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> type[Launcher]:
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
        return RayLauncher
