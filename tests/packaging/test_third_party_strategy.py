"""A third party's strategy, optimizer and tracker, installed from their wheels: options, ranks and keys count."""

import json
import subprocess

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def words(tiny_llama, tmp_path):
    """``words(output, *more)``: the command line of a short run."""
    rows = [{"input_ids": [n, *range(3, 13)], "loss_mask": [0] + [1] * 10} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = [
        f"target={tiny_llama}", f"data.path={tmp_path / 'rows.jsonl'}", "train.global_batch_tokens=66",
        "train.schedule=constant", "draft.num_steps=2",
    ]  # fmt: skip
    return lambda output, *more: [*shared, f"output={output}", *more]


def test_two_processes_train_the_same_samples_and_give_the_losses_of_one(
    words, run, clean_python, losses_of, tmp_path
):
    """Two copies are one data-parallel rank, as the ranks of a tensor-parallel group are. They resume, too, but not
    with another momentum of the optimizer, or by a strategy that cannot read their files."""
    ours, theirs = tmp_path / "one", tmp_path / "two"
    command = clean_python.with_name("spec-trainer")
    run(
        command,
        *words(ours, "train.steps=4", "strategy.name=replicated", "optimizer.name=normed"),
        cwd=tmp_path,
    )
    two = ["placement.kind=disaggregated", "train.ranks=2", "strategy.name=replicated", "strategy.copies=2"]
    two += ["optimizer.name=normed"]
    two += [f"track.lines={tmp_path / 'lines'}"]
    for steps in (2, 4):
        run(command, *words(theirs, f"train.steps={steps}", *two), cwd=tmp_path)
    another = words(theirs, "train.steps=6", *two, "optimizer.momentum=0.5")
    fsdp = words(
        ours, "train.steps=6", "placement.kind=colocated", "strategy.name=fsdp", "optimizer.name=normed"
    )
    for refused, told in [
        (["train", *another], f"{theirs} belongs to another run ("),
        (["plan", *another], f"{theirs} belongs to another run ("),
        (["train", *fsdp], "step-4 was written by strategy 'replicated', and 'fsdp' cannot read it; set "),
    ]:
        done = subprocess.run(
            [command, *refused], capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        assert told in done.stderr
    assert losses_of(theirs) == pytest.approx(losses_of(ours), rel=1e-5)
    assert [file.name for file in (theirs / "logs").glob("trained-*")] == ["trained-0.jsonl"]
    config = yaml.safe_load((theirs / "config.yaml").read_text())
    assert config["strategy"] == {"name": "replicated", "bucket_mib": 25, "copies": 2}
    assert config["optimizer"] == {"name": "normed", "momentum": 0.9}
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(losses_of(theirs), 1))
    assert len({line["run"] for line in lines}) == 1
    exported = tmp_path / "exported"
    run(command, "export", "--checkpoint", theirs / "checkpoints/step-4", "--output", exported)
    weights = "model.safetensors"
    assert (exported / weights).read_bytes() == (theirs / "draft" / weights).read_bytes()
