"""``export`` and ``convert`` with ``--format``: a file that another program than vLLM and SGLang loads."""

import errno
import re
import shlex
from pathlib import Path

import gguf
import numpy as np
import pytest

from spec_kit.targets import read_target
from spec_testing import draw_draft
from spec_trainer.cli.app import run

from ..distributions import write_distribution
from ..gguf_targets import write_target_gguf

PLAIN = ("draft.fc_norm=false", "draft.norm_output=false")


@pytest.fixture(scope="module")
def target_gguf(tiny_llama, tmp_path_factory) -> Path:
    return write_target_gguf(tiny_llama, tmp_path_factory.mktemp("gguf") / "target.gguf")


@pytest.fixture(scope="module")
def trained(tiny_llama, rows_file, tmp_path_factory) -> Path:
    """A run with the original norms, which has ended after one step."""
    output = tmp_path_factory.mktemp("trained") / "run"
    words = ["--target", tiny_llama, "--data", rows_file, "--output", output, "train.steps=1", *PLAIN]
    assert run([str(word) for word in words]) == 0
    return output


def test_a_checkpoint_and_the_runs_draft_become_the_same_file(
    command_line, trained, tiny_llama, target_gguf, tmp_path
):
    options = ["--format", "gguf", f"engine.gguf={target_gguf}", "engine.draft_type=f32"]
    exported = command_line(
        "export",
        "--checkpoint",
        trained / "checkpoints" / "step-1",
        "--output",
        tmp_path / "one.gguf",
        *options,
    )
    converted = command_line(
        "convert", "--draft-model", trained / "draft", "--target", tiny_llama, "--output", tmp_path / "two.gguf",
        *options,
    )  # fmt: skip
    assert (exported.code, exported.err, converted.code, converted.err) == (0, "", 0, "")
    for outcome, name in ((exported, "one.gguf"), (converted, "two.gguf")):
        first, *_, command = outcome.out.splitlines()
        assert first == f"draft: {tmp_path / name}"
        assert shlex.split(command) == [
            "llama-server", "-m", str(target_gguf), "-md", str(tmp_path / name), "--spec-type", "draft-eagle3",
            "--spec-draft-n-max", "4", "--metrics",
        ]  # fmt: skip
    one, two = (gguf.GGUFReader(tmp_path / name).tensors for name in ("one.gguf", "two.gguf"))
    assert [tensor.name for tensor in one] == [tensor.name for tensor in two]
    assert all(np.array_equal(mine.data, theirs.data) for mine, theirs in zip(one, two, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gguf", "two.gguf"]


def test_the_commands_of_a_run_say_how_its_draft_becomes_a_file(command_line, trained, tiny_llama, tmp_path):
    """The first half of the command works as it stands, once the target's file is named."""
    words = ("export", "--checkpoint", trained / "checkpoints" / "step-1", "--output", tmp_path / "draft")
    lines = command_line(*words).out.splitlines()
    command = lines[lines.index("serve it with llamacpp:") + 1]
    convert, serve = command.split(" && ")
    assert shlex.split(convert)[:6] == [
        "spec-trainer", "convert", "--draft-model", str(tmp_path / "draft"), "--target", str(tiny_llama),
    ]  # fmt: skip
    file = write_target_gguf(tiny_llama, tmp_path / "TARGET.gguf")
    assert command_line(*shlex.split(convert.replace("TARGET.gguf", str(file)))[1:]).code == 0
    assert Path(shlex.split(serve)[4]).is_file()


def test_a_format_of_two_plugins_is_refused(command_line, trained, tmp_path, monkeypatch):
    points = "[spec_core.engines]\nother = other_engine:Other\n"
    site = write_distribution(tmp_path / "site", "other", points)
    (site / "other_engine.py").write_text(
        "from spec_engine_llamacpp.engine import LlamacppEngine\nclass Other(LlamacppEngine):\n    name = 'other'\n"
    )
    monkeypatch.syspath_prepend(site)
    words = (
        "export",
        "--checkpoint",
        trained / "checkpoints" / "step-1",
        "--output",
        tmp_path / "draft.gguf",
    )
    line = command_line(*words, "--format", "gguf").error
    assert line.startswith("--format=gguf is written by engine 'llamacpp' of spec-engine-llamacpp 0.1.0 and ")
    assert line.endswith("engine 'other' of other 1.0; uninstall one of them")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--format", "onnx"],
            "--format=onnx: no engine plugin here writes this format; they write gguf, speculators",
        ),
        (["engine.gguf=x"], "engine.gguf=x: options of an engine need --format, the format that it writes"),
        (["--format", "gguf", "engine.guf=x"], "options: unknown key 'engine.guf' (did you mean 'gguf'?)"),
        (["--format", "gguf"], "GGUF files; set engine.gguf to the file"),
        (["--format", "gguf", "engine.gguf=none"], "engine.gguf=none: there is no such file"),
        (["--format", "gguf", "--whole-target"], "--whole-target with --format=gguf: it writes a folder"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(command_line, trained, tmp_path, words, problem):
    checkpoint = trained / "checkpoints" / "step-1"
    outcome = command_line("export", "--checkpoint", checkpoint, "--output", tmp_path / "draft.gguf", *words)
    assert outcome.code == 2
    assert problem in outcome.error
    assert not list(tmp_path.iterdir())


def test_a_refused_draft_is_not_named_by_a_folder_of_the_command_s_own(
    command_line, tiny_llama, target_gguf, tmp_path
):
    draft = draw_draft(tmp_path / "draft", read_target(tiny_llama), 0)
    words = ["--draft-model", draft, "--target", tiny_llama, "--output", tmp_path / "draft.gguf"]
    outcome = command_line("convert", *words, "--format", "gguf", f"engine.gguf={target_gguf}")
    assert outcome.code == 2
    assert outcome.error.startswith("draft cannot be served by llama.cpp: it has EAGLE 3.1's norms")


def test_a_full_disk_is_said_of_the_output(command_line, tiny_llama, tmp_path, limit_files, monkeypatch):
    draft = draw_draft(tmp_path / "draft", read_target(tiny_llama), 0)
    words = ["convert", "--draft-model", draft, "--target", tiny_llama, "--output", tmp_path / "theirs"]
    written = rf"spec-trainer: error: draft {tmp_path}/theirs was not written: "
    line = rf"{written}.* are free in {tmp_path}\); .*, then run the same command"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spec_engine_vllm.serving.write_speculators", full)
        outcome = command_line(*words, "--format", "speculators")
    assert outcome.code == 1
    assert re.match(line, outcome.err.splitlines()[-1])
    limit_files(2000)
    outcome = command_line(*words, "--format", "speculators")
    assert outcome.code == 1
    assert re.match(line, outcome.err.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
