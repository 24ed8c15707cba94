"""Commands that train nothing: they do not import torch, and plan says what a run would be."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ..launching import program
from .conftest import STEPS


def test_light_commands_do_not_import_torch():
    """In one process, one after the other: what one of them had imported would stay."""
    light = [
        ["--help"], ["--version"], ["train", "--help"], ["plan", "--help"], ["plugins"],
        ["plugins", "--json"],
    ]  # fmt: skip
    code = (
        "import sys; from spec_trainer.cli.app import run\n"
        f"for command in {light!r}:\n"
        "    assert run(command) == 0, command\n"
        "    heavy = {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
        "    assert not heavy, (command, heavy)\n"
        "    print('=====')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stderr) == (0, "")
    answers = child.stdout.split("=====\n")[:-1]
    assert len(answers) == len(light)
    assert all(answer.strip() for answer in answers)


@pytest.mark.parametrize("words", [["plugins"], ["--help"], ["--version"], ["--print-completion", "bash"]])
def test_a_standard_output_that_is_full_is_named(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*program(), *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (
        1, "spec-trainer: error: standard output could not be written: No space left on device\n",
    )  # fmt: skip


def test_plugins_are_listed_with_what_the_design_asks_for(command_line):
    outcome = command_line("plugins", "--json")
    rows = json.loads(outcome.out)
    assert {(row["kind"], row["name"]) for row in rows} >= {
        ("backend", "cpu"), ("draft", "eagle3"), ("engine", "hf"), ("strategy", "fsdp")
    }  # fmt: skip
    for row in rows:
        assert row.keys() == {
            "kind", "name", "distribution", "version", "api", "status", "reason"
        }  # fmt: skip
    assert all(row["status"] == "ok" and row["api"] == 1 for row in rows if row["name"] == "cpu")
    assert "eagle3" in command_line("plugins").out


def test_plan_is_one_document_and_creates_nothing(command_line, words, tmp_path):
    outcome = command_line("plan", *words(tmp_path / "out"), "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 0
    assert (document["draft"], document["steps"], document["placement"]) == ("eagle3", STEPS, "inline")
    assert document["samples"] + document["held_out_samples"] == 40
    assert document["processes"] == ["this process: engine hf and trainer rank 0 (fsdp), backend cpu"]
    assert not (tmp_path / "out").exists()
    assert "placement: inline" in command_line("plan", *words(tmp_path / "out")).out


def test_plan_refuses_a_draft_that_an_installed_engine_is_too_old_for(
    command_line, words, tmp_path, monkeypatch
):
    given = words(tmp_path / "out")
    without = json.loads(command_line("plan", *given, "--json").out)
    assert list(without["served_by"]) == ["sglang", "vllm"]
    read_version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.25.0" if name == "vllm" else read_version(name))
    refused = command_line("plan", *given)
    assert refused.error.startswith("no engine that is installed here serves draft eagle3 with")
    assert "vllm 0.25.0 is installed, this engine works with >=0.26,<0.34; pip install" in refused.error
    elsewhere = json.loads(command_line("plan", *given, "--serve-elsewhere", "--json").out)
    (warning,) = [text for text in elsewhere["warnings"] if "no engine that is installed here" in text]
    assert warning in refused.error
    assert "--serve-elsewhere" not in warning
    assert elsewhere["served_by"]["vllm"].endswith("pip install 'vllm>=0.26,<0.34'")


def test_plan_names_every_process(command_line, words, tmp_path):
    kind = ["placement.kind=disaggregated", "train.ranks=2", "engine.replicas=3"]
    processes = json.loads(command_line("plan", *words(tmp_path / "out", *kind), "--json").out)["processes"]
    assert len(processes) == 5
    assert sum("trainer" in line for line in processes) == 2
