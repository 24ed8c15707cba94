"""Broken plugins of others beside commands that do not name them change nothing; those that do end in one line."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from ..distributions import write_distribution
from . import run_directory
from .launching import program
from .run_directory import losses

OTHERS = Path(__file__).parents[1] / "plugins"
INSTALLED = (
    "broken/spec-broken", "broken/spec-tracker-failing", "broken/spec-optimizer-failing", "spec-engine-remote",
)  # fmt: skip
"""Folders of the strangers' distributions. The engine ``remote`` captures, but serves no draft."""
LIMIT_S = 120
IN_TURN = """
import json, sys
from spec_trainer.cli.app import run
from spec_trainer.cli.documents import keep_stdout_for_documents
keep_stdout_for_documents()
sys.exit(max(run(words) for words in json.loads(sys.argv[1])))
"""
"""Command lines, one after the other in a process of their own; its exit code is the highest of theirs."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Environment of processes in which all of ``INSTALLED`` are there, as by ``pip install --editable``."""
    return {**os.environ, "PYTHONPATH": str(_site(tmp_path_factory.mktemp("site"), *INSTALLED))}


@pytest.fixture
def with_heavy(installed, tmp_path) -> dict[str, str]:
    """The same with an engine whose import ends the process as Ctrl-C does, so that none may import it."""
    heavy = _site(tmp_path, "broken/spec-engine-heavy")
    return {**installed, "PYTHONPATH": os.pathsep.join([installed["PYTHONPATH"], str(heavy)])}


def _site(site: Path, *distributions: str) -> Path:
    for folder in map(OTHERS.joinpath, distributions):
        name = folder.name
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        points = "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
            for group, points in project["entry-points"].items()
        )
        write_distribution(site, name, points, project["version"])
        package = name.replace("-", "_")
        (site / package).symlink_to(folder / "src" / package)
    return site


@pytest.fixture
def call(installed, tmp_path):
    """``call(*words)``: code, stdout and stderr of a command beside the plugins of others."""

    def call(
        *words: object, begin: Sequence[str] = program(), env: dict[str, str] = installed
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, [*begin, *words])), capture_output=True, text=True, env=env, cwd=tmp_path,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip

    return call


@pytest.fixture
def call_in_turn(call):
    """``call_in_turn(commands)``: the same of several commands, in one process."""

    def call_in_turn(commands: list[list[object]]) -> subprocess.CompletedProcess[str]:
        document = json.dumps([list(map(str, words)) for words in commands])
        return call(document, begin=[sys.executable, "-P", "-c", IN_TURN])

    return call_in_turn


@pytest.fixture(scope="module")
def run_words(peaked_target, rows_file) -> list[object]:
    return [
        "--target", peaked_target, "--data", rows_file, "train.steps=3", "train.global_batch_tokens=96",
        "draft.num_steps=2",
    ]  # fmt: skip


def test_plan_imports_no_engine_that_it_does_not_need(command_line, run_words, with_heavy, monkeypatch):
    for site in with_heavy["PYTHONPATH"].split(os.pathsep):
        monkeypatch.syspath_prepend(site)
    done = command_line("plan", *run_words, "--json")
    assert (done.code, done.err.count("spec-trainer: ")) == (0, 0), done.err
    assert list(json.loads(done.out)["served_by"]) == ["sglang", "vllm"]


@pytest.mark.slow
def test_commands_that_name_none_of_them_are_not_changed(
    call, command_line, run_words, peaked_target, rows_file, tmp_path, monkeypatch, installed, with_heavy
):
    """Without them: the same commands in this process. Completion alone imports every plugin, for its keys."""
    monkeypatch.chdir(tmp_path)
    outcomes = {}
    for beside in (False, True):
        folder = tmp_path / f"beside-{beside}"
        lines = {}
        for name, words in {
            "plan": ["plan", *run_words, "--output", "runs/x", "--json"],
            "train": ["train", *run_words, "--output", folder],
            "export": ["export", "--checkpoint", folder / "checkpoints" / "step-3", "--output", folder / "exported"],
            "convert": [
                "convert", "--draft-model", folder / "draft", "--target", peaked_target, "--output", folder / "new",
            ],
            "evaluate": [
                "evaluate", "--target", peaked_target, "--draft-model", folder / "draft", "--prompts", rows_file,
                "--max-new-tokens", "4", "--json",
            ],
            "completion": ["--print-completion", "bash"],
        }.items():  # fmt: skip
            if beside:
                done = call(*words, env=installed if name == "completion" else with_heavy)
                code, out, err = done.returncode, done.stdout, done.stderr
            else:
                done = command_line(*words)
                code, out, err = done.code, done.out, done.err
            assert code == 0, err
            lines[name] = out.replace(str(folder), "FOLDER")
            assert "spec-broken is here" not in out
        plan = json.loads(lines.pop("plan"))
        measured = plan.pop("resources"), plan.pop("expected_time")
        assert all(measured)
        lines["plan"] = json.dumps(plan)
        completion = lines.pop("completion")  # which offers the names of all that is installed
        assert all(name in completion for name in ("eagle3", "train.steps"))
        figures = json.loads(lines.pop("evaluate"))
        weights = [(folder / name / "model.safetensors").read_bytes() for name in ("draft", "exported")]
        outcomes[beside] = (lines, figures["acceptance_length"], losses(folder), weights)
    assert outcomes[True] == outcomes[False]


@pytest.mark.slow
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


def test_a_command_that_names_one_ends_in_one_line(call_in_turn, run_words, tmp_path):
    kinds = ["backend", "draft", "engine", "strategy", "launcher", "tracker"]
    keys = {kind: f"{kind}.name=broken" for kind in kinds} | {"tracker": "track.broken=x"}
    done = call_in_turn([["train", *run_words, keys[kind]] for kind in kinds])
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if line.startswith("spec-trainer: ")]
    assert lines == [
        f"spec-trainer: error: {kind} 'broken' of spec-broken 0.1.0 does not import (spec_broken.plugin:Broken): "
        "SystemExit: 0"
        for kind in kinds
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("placement", ["inline", pytest.param("colocated", marks=pytest.mark.slow)])
def test_an_error_in_a_strangers_code_ends_a_run_with_the_strangers_name(
    command_line, run_words, tmp_path, monkeypatch, placement
):
    site = str(_site(tmp_path / "site", "broken/spec-optimizer-failing"))
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", site)  # for the workers
    words = [*run_words, "--output", tmp_path / "run", "--placement", placement, "optimizer.name=failing"]
    done = command_line("train", *words)
    (line,) = [line for line in done.err.splitlines() if line.startswith("spec-trainer: ")]
    assert done.code == 1
    assert "KeyError: 'momentum', raised in optimizer 'failing' of spec-optimizer-failing 0.1.0" in line


ODD = """
from pydantic import model_validator
from spec_draft_eagle3.draft import Eagle3Draft

class Config(Eagle3Draft.Config):
    pass

class Odd(Eagle3Draft):
    name = "odd"
    Config = Config
"""
REFUSING = ODD.replace(
    "    pass", "    @model_validator(mode='after')\n    def look(self):\n        raise OSError('no licence')"
)


@pytest.fixture
def odd_draft(tmp_path, monkeypatch):
    """``odd_draft(source)``: an installed draft ``odd``, whose module has this source."""

    def install(source: str) -> None:
        site = write_distribution(tmp_path / "site", "odd", "[spec_core.drafts]\nodd = odd_answers:Odd\n")
        (site / "odd_answers.py").write_text(source)
        monkeypatch.delitem(sys.modules, "odd_answers", raising=False)
        monkeypatch.syspath_prepend(site)

    return install


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("required_features", "FeatureSchema"),
        ("target_tensors", "Sequence"),
        ("shard_hints", "ShardHints"),
        ("build", "Module"),
        ("cost", "DraftCost"),
        ("exported_config", "dict"),
        ("denominators", "Tensor"),
    ],
)
def test_a_method_that_lacks_its_return_is_named(
    command_line, run_words, odd_draft, tmp_path, method, expected
):
    odd_draft(f"{ODD}\n    def {method}(self, *given): pass\n")
    done = command_line("train", *run_words, "--output", tmp_path / "run", "draft.name=odd")
    assert done.error == f"draft 'odd' of odd 1.0: its {method} returned None, expected {expected}"


def test_an_error_of_the_system_in_a_strangers_config_is_named(command_line, run_words, odd_draft, tmp_path):
    odd_draft(REFUSING)
    done = command_line("train", *run_words, "--output", tmp_path / "run", "draft.name=odd")
    assert done.error == "OSError: no licence, raised in draft 'odd' of odd 1.0"


@pytest.mark.slow
def test_a_run_goes_on_without_a_tracker_that_fails(call_in_turn, run_words, tmp_path):
    failures = {
        "open": "did not open: ConnectionError: the service is gone (open)",
        "log": "did not take step 2: ConnectionError: the service is gone (log)",
        "exit": "did not take step 2: SystemExit: 7",
        "close": "did not close: ConnectionError: the service is gone (close)",
    }
    done = call_in_turn(
        [["train", *run_words, "--output", tmp_path / where, f"track.failing={where}"] for where in failures]
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("draft", "report"))] == [
        line
        for where in failures
        for line in (f"draft: {tmp_path}/{where}/draft", f"report: {tmp_path}/{where}/report.html")
    ]
    for where, failed in failures.items():
        line = (
            f"track.failing='{where}': tracker of spec-tracker-failing 0.1.0 {failed}; "
            "the run goes on without it"
        )
        assert done.stderr.count(line) == 1
        assert len(losses(tmp_path / where)) == 3
        summary = run_directory.summary(tmp_path / where)
        assert summary["trackers_failed"] == {"failing": failed}
        assert yaml.safe_load((tmp_path / where / "config.yaml").read_text())["track"]["failing"] == where
