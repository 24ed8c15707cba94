"""Trackers, launchers and types of targets of third parties install and work without torch, by pip's own choice."""

import shutil
from pathlib import Path

import pytest

from .environments import make_environment, required_of_others
from .release import install, requirements

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIGHT = ["spec-tracker-lines", "spec-launcher-pipes", "spec-target-type-ling"]


def test_light_plugins_of_third_parties_work_without_torch(run, wheels, tmp_path):
    """The environment holds what their metadata requires, and nothing else."""
    needed = [line for name in LIGHT for line in requirements(name, wheels)]
    python = make_environment(tmp_path / "environment", required_of_others(needed))
    install(python, wheels["spec-core"].parent, *LIGHT)
    script = shutil.copy(Path(__file__).with_name("without_torch.py"), tmp_path)
    run(python, script, tmp_path, cwd=tmp_path)
