"""Drafts exported from checkpoints, whole and damaged."""

import shlex
import shutil

import pytest

from spec_trainer.training.checkpoint.folder import read_meta

from ..run_directory import contents, draft_weights, losses


def test_exported_checkpoint_is_the_runs_draft_bit_for_bit(command_line, trained, tmp_path, peaked_target):
    output = tmp_path / "drafts" / "one"
    outcome = command_line("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", output)
    assert (outcome.code, outcome.err) == (0, "")
    first, length, *serve = outcome.out.splitlines()
    assert first == f"draft: {output}"
    assert length.startswith("acceptance length (tau): ")
    assert [line for line in serve if line.startswith("serve it")] == [
        f"serve it with {engine}:" for engine in ("sglang", "vllm")
    ]
    commands = [shlex.split(line) for line in serve if line.startswith("  ")]
    assert [command[:3] for command in commands] == [
        ["python", "-m", "sglang.launch_server"],
        ["vllm", "serve", str(peaked_target)],
    ]
    assert all(str(output) in " ".join(command) for command in commands)
    assert contents(output) == contents(trained / "draft")
    again = command_line("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", output)
    assert again.error == f"output {output} exists; choose a new folder"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("state/rank-0.safetensors", "flipped"),
        ("state/index.json", "cut"),
        ("meta.json", "cut"),
        ("config.yaml", "flipped"),
    ],
)
def test_damage_in_a_checkpoint_is_noticed_by_export_and_resume(command_line, copied, words, file, damage):
    checkpoint = copied / "checkpoints" / "step-12"
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:20] if damage == "cut" else content)
    line = command_line("export", "--checkpoint", checkpoint, "--output", copied / "new").error
    assert str(path) in line
    assert not (copied / "new").exists()
    line = command_line(*words(copied)).error
    assert str(path) in line
    assert line.endswith(f"go on from step-10 with --resume-from previous, or delete {checkpoint}")


def test_the_checkpoint_before_a_damaged_one_is_resumed_on_demand(command_line, copied, trained, words):
    last = copied / "checkpoints" / "step-12"
    (last / "state" / "rank-0.safetensors").write_bytes(b"")
    assert command_line(*words(copied), "--resume-from", "previous").code == 0
    assert losses(copied) == losses(trained)
    assert contents(last / "state") == contents(trained / "checkpoints" / "step-12" / "state")
    assert draft_weights(copied) == draft_weights(trained)
    assert "resume_from: latest" in (copied / "config.yaml").read_text()
    assert command_line(*words(copied)).code == 0


def test_export_below_a_file_is_refused(command_line, trained, rows_file):
    checkpoint = trained / "checkpoints" / "step-12"
    line = command_line("export", "--checkpoint", checkpoint, "--output", rows_file / "draft").error
    assert "is not a folder that can be written to" in line


def test_export_after_the_target_has_changed_is_refused(command_line, trained, tmp_path, make_target):
    words = ("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", tmp_path / "draft")
    assert "has changed since" in command_line(*words, "--target", make_target("llama")).error


def test_export_says_that_another_version_may_have_computed_the_digest(command_line, copied, tmp_path):
    checkpoint = copied / "checkpoints" / "step-12"
    meta = read_meta(checkpoint)
    before = meta.model_copy(update={"target_digest": "0123456789abcdef" * 4})
    (checkpoint / "meta.json").write_text(before.to_json())
    line = command_line("export", "--checkpoint", checkpoint, "--output", tmp_path / "draft").error
    assert f"has digest {meta.target_digest[:12]}" in line
    assert "trained on a target of digest 0123456789ab" in line
    assert "or another version of spec-trainer wrote the checkpoint" in line


def test_export_finds_a_target_that_was_moved(command_line, trained, tmp_path, peaked_target):
    moved = shutil.copytree(peaked_target, tmp_path / "moved")
    words = ("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", tmp_path / "draft")
    assert command_line(*words, "--target", moved).code == 0
    exported, own = contents(tmp_path / "draft"), contents(trained / "draft")
    card = exported.pop("README.md").replace(b"draft for moved", f"draft for {peaked_target.name}".encode())
    assert card == own.pop("README.md")
    assert exported == own
