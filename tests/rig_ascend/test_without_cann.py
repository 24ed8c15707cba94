"""torch-npu installed and CANN not: what a user meets before the first ``source set_env.sh``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("spec-trainer"))


def without_cann(*words, **environ):
    """A command in an environment from which the rig is gone."""
    rig = {"LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "FAKE_CANN"}
    kept = {name: value for name, value in os.environ.items() if name not in rig}
    return subprocess.run(
        words, env={**kept, **environ}, capture_output=True, text=True, timeout=120, check=False
    )


def test_torch_itself_does_not_import_until_it_is_told_to_leave_torch_npu_alone():
    assert without_cann(sys.executable, "-c", "import torch").returncode != 0
    done = without_cann(sys.executable, "-c", "import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_the_list_of_plugins_says_what_to_source():
    done = without_cann(COMMAND, "plugins", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in json.loads(done.stdout) if row["name"] == "ascend"]
    assert row["status"] == "unavailable"
    assert "set_env.sh" in row["reason"]


def test_the_check_says_what_to_source():
    done = without_cann(COMMAND, "check", "--backend", "ascend")
    assert done.returncode == 1
    assert "libascendcl.so" in done.stdout
    assert "set_env.sh" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_is_refused_in_one_line(command, tmp_path):
    words = [f"target={tmp_path}", f"data.path={tmp_path}", "backend.name=ascend"]
    done = without_cann(COMMAND, command, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "set_env.sh" in done.stderr


def test_an_empty_list_of_cards_is_refused_with_its_remedy():
    environ = {**os.environ, "ASCEND_RT_VISIBLE_DEVICES": ""}
    words = [COMMAND, "check", "--backend", "ascend"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "unset it" in " ".join(done.stdout.split())
