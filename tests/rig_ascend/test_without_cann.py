"""torch-npu installed and CANN not: what a user meets before the first ``source set_env.sh``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import make_target, tiny_llama  # noqa: F401 (fixtures)
from ..integration import launching
from ..packaging.conftest import clean_python, wheels  # noqa: F401 (fixtures)

COMMAND = str(Path(sys.executable).with_name("spec-trainer"))
AUTOLOAD_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

pytestmark = pytest.mark.xdist_group("without CANN")


def without_cann(*words, **environ):
    """A command in an environment from which the rig is gone."""
    rig = {"LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "FAKE_CANN"}
    kept = {name: value for name, value in os.environ.items() if name not in rig}
    paths = [path for path in kept.pop("PYTHONPATH").split(os.pathsep) if "fake_cann" not in path]
    environ |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return subprocess.run(
        [str(word) for word in words],
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_torch_itself_does_not_import_until_it_is_told_to_leave_torch_npu_alone():
    assert without_cann(sys.executable, "-c", "import torch").returncode != 0
    done = without_cann(sys.executable, "-c", "import torch", **AUTOLOAD_OFF)
    assert done.returncode == 0, done.stderr


def test_the_check_says_what_to_source_in_one_line():
    done = without_cann(COMMAND, "check", "--backend", "ascend")
    assert (done.returncode, done.stderr) == (1, "")
    (line,) = [line for line in done.stdout.splitlines() if "libascendcl.so" in line]
    assert "set_env.sh" in line


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_is_refused_in_one_line(command, tmp_path):
    words = [f"target={tmp_path}", f"data.path={tmp_path}", "backend.name=ascend"]
    done = without_cann(COMMAND, command, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "set_env.sh" in done.stderr


def test_other_hardware_works_in_every_process_of_a_run(tiny_llama, tmp_path):  # noqa: F811
    """Launcher, engine and trainer import torch; the engine's Transformers looks for torch_npu by itself."""
    rows = launching.write_rows(tmp_path / "rows.jsonl")
    keys = ["placement.kind=disaggregated", "train.steps=1", "train.global_batch_tokens=96"]
    words = [f"target={tiny_llama}", f"data.path={rows}", f"output={tmp_path / 'run'}", *keys]
    done = without_cann(COMMAND, "train", "--backend", "cpu", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/draft/model.safetensors").exists()


@pytest.mark.slow
def test_wheels_in_a_clean_environment_have_the_command_and_say_what_to_source(clean_python, tmp_path):  # noqa: F811
    command = clean_python.with_name("spec-trainer")
    done = without_cann(command, "plugins", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {(row["kind"], row["name"]): row for row in json.loads(done.stdout)}
    assert rows["backend", "ascend"]["status"] == "unavailable"
    assert "set_env.sh" in rows["backend", "ascend"]["reason"]
    assert {row["status"] for row in rows.values()} == {"ok", "unavailable"}
    done = without_cann(command, "check", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]


def test_with_cann_nothing_is_left_out():
    """The command stays the process that was started, and torch loads torch_npu in it."""
    code = (
        "import torch; from spec_trainer.cli import app; app.run = lambda words: print(words, {}); app.main()"
    )
    words = [sys.executable, "-c", code.format("hasattr(torch, 'npu')"), "word"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1] == "['word'] True", done.stderr


def test_an_empty_list_of_cards_is_refused_with_its_remedy():
    environ = {**os.environ, "ASCEND_RT_VISIBLE_DEVICES": ""}
    words = [COMMAND, "check", "--backend", "ascend"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "unset it" in done.stdout
