"""Broken plugins of others beside commands that do not name them change nothing; those that do end in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

OTHERS = Path(__file__).parents[1] / "plugins" / "broken"
PROGRAM = Path(sys.executable).with_name("spec-trainer")
LIMIT_S = 120


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Environment of processes in which both distributions are installed, as by ``pip install --editable``."""
    site = tmp_path_factory.mktemp("site")
    for name in ("spec-broken", "spec-tracker-failing"):
        project = tomllib.loads((OTHERS / name / "pyproject.toml").read_text())["project"]
        info = site / f"{name.replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n"
        )
        (info / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
                for group, points in project["entry-points"].items()
            )
        )
        package = name.replace("-", "_")
        (site / package).symlink_to(OTHERS / name / "src" / package)
    return {**os.environ, "PYTHONPATH": str(site)}


@pytest.fixture
def call(installed, tmp_path):
    """``call(*words, beside=True)``: code, stdout and stderr of a command, with or without the plugins of others."""

    def call(*words: object, beside: bool = True) -> subprocess.CompletedProcess[str]:
        env = installed if beside else {**os.environ}
        return subprocess.run(
            [PROGRAM, *map(str, words)], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip

    return call


@pytest.fixture(scope="module")
def run_words(peaked_target, rows_file) -> list[object]:
    return [
        "--target", peaked_target, "--data", rows_file, "train.steps=3", "train.global_batch_tokens=96",
        "draft.num_steps=2",
    ]  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_commands_that_name_none_of_them_are_not_changed(call, run_words, peaked_target, rows_file, tmp_path):
    outcomes = {}
    for beside in (False, True):
        folder = tmp_path / f"beside-{beside}"
        lines = {}
        for name, words in {
            "plan": ["plan", *run_words, "--output", "runs/x", "--json"],
            "train": ["train", *run_words, "--output", folder],
            "export": ["export", "--checkpoint", folder / "checkpoints" / "step-3", "--output", folder / "exported"],
            "evaluate": [
                "evaluate", "--target", peaked_target, "--draft-model", folder / "draft", "--prompts", rows_file,
                "--max-new-tokens", "4", "--json",
            ],
            "completion": ["--print-completion", "bash"],
        }.items():  # fmt: skip
            done = call(*words, beside=beside)
            assert done.returncode == 0, done.stderr
            lines[name] = done.stdout.replace(str(folder), "FOLDER")
            assert "spec-broken is here" not in done.stdout
        figures = json.loads(lines.pop("evaluate"))
        weights = [(folder / name / "model.safetensors").read_bytes() for name in ("draft", "exported")]
        outcomes[beside] = (lines, figures["acceptance_length"], losses(folder), weights)
    assert outcomes[True] == outcomes[False]


def test_plugins_and_check_show_what_is_broken(call):
    rows = json.loads(call("plugins", "--json").stdout)
    broken = [row for row in rows if row["distribution"] == "spec-broken"]
    assert len(broken) == 8
    for row in broken[:-1]:
        assert (row["name"], row["status"]) == ("broken", "broken")
        assert row["reason"].endswith(
            "of spec-broken 0.1.0 does not import (spec_broken.plugin:Broken): SystemExit: 0"
        )
    assert broken[-1]["reason"] == "there is no such kind of plugin (did you mean 'spec_core.trackers'?)"
    assert {row["name"]: row["status"] for row in rows}["cpu"] == "ok"
    machine = json.loads(call("check", "--json").stdout)
    assert machine["ok"]
    assert machine["plugins"]["backend broken"].startswith("broken: backend 'broken' of spec-broken 0.1.0")


@pytest.mark.parametrize("kind", ["backend", "draft", "engine", "strategy", "launcher", "tracker"])
def test_a_command_that_names_one_ends_in_one_line(call, run_words, kind, tmp_path):
    words = ["track.broken=x"] if kind == "tracker" else [f"{kind}.name=broken"]
    done = call("train", *run_words, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == (
        f"spec-trainer: error: {kind} 'broken' of spec-broken 0.1.0 does not import (spec_broken.plugin:Broken): "
        "SystemExit: 0"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("where", "failed"),
    [
        ("open", "did not open: ConnectionError: the service is gone (open)"),
        ("log", "did not take step 2: ConnectionError: the service is gone (log)"),
        ("exit", "did not take step 2: SystemExit: 7"),
        ("close", "did not close: ConnectionError: the service is gone (close)"),
    ],
)
def test_a_run_goes_on_without_a_tracker_that_fails(call, run_words, where, failed, tmp_path):
    done = call("train", *run_words, "--output", tmp_path / "run", f"track.failing={where}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"draft: {tmp_path}/run/draft\nreport: {tmp_path}/run/report.html\n"
    line = (
        f"track.failing='{where}': tracker of spec-tracker-failing 0.1.0 {failed}; the run goes on without it"
    )
    assert done.stderr.count(line) == 1
    assert len(losses(tmp_path / "run")) == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["trackers_failed"] == {
        "failing": failed
    }
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["track"]["failing"] == where
