"""A third party's launcher runs a training of three workers, from wheels, without a changed line here."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_third_partys_launcher_runs_a_training(run, clean_python, tiny_llama, rows, losses_of, tmp_path):
    output = tmp_path / "run"
    command = clean_python.parent / "spec-trainer"
    words = ["--target", tiny_llama, "--data", rows, "--launcher", "pipes", "--output", output]
    run(command, *words, "launcher.nice=5", "placement.kind=disaggregated", "train.ranks=2",
        "train.steps=3", "train.global_batch_tokens=200", cwd=tmp_path)  # fmt: skip
    assert len(losses_of(output)) == 3
    assert (output / "draft" / "config.json").exists()
    assert {file.name for file in (output / "logs").glob("*-[0-9].log")} == {
        "engine-0.log",
        "trainer-0.log",
        "trainer-1.log",
    }
    unknown = ["launcher.colour=blue", "placement.kind=disaggregated"]
    with pytest.raises(AssertionError, match=r"unknown key 'launcher.colour'"):
        run(command, *words, *unknown, cwd=tmp_path)
