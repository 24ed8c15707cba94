"""Readers of what a run has left in its directory."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _whole_lines(output / "metrics.jsonl")]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in metrics(output)]


def summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text())


def versions(output: Path) -> list[dict[str, Any]]:
    """The drafts that ``follow`` has trained, with its verdict on each."""
    return [json.loads(line) for line in _whole_lines(output / "versions.jsonl")]


def draft_weights(output: Path) -> bytes:
    return (output / "draft" / "model.safetensors").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def trained(output: Path) -> dict[int, list[list[int]]]:
    """Step -> sample ids, a list for every rank, as the ranks themselves noted."""
    steps: dict[int, list[list[int]]] = {}
    for file in sorted((output / "logs").glob("trained-*.jsonl")):
        for line in _whole_lines(file):
            record = json.loads(line)
            steps.setdefault(record["step"], []).append(record["samples"])
    return steps


def assert_trained_exactly_once(output: Path, samples: Sequence[int]) -> None:
    """Every step is there once; every sample is in every epoch once, on one rank, as far as the epoch went."""
    records, steps = metrics(output), trained(output)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert sorted(steps) == [record["step"] for record in records]
    epochs: dict[int, Counter[int]] = {}
    for record in records:
        done = Counter(sample for share in steps[record["step"]] for sample in share)
        assert done.total() == record["samples"]
        epochs.setdefault(record["epoch"], Counter()).update(done)
    whole = Counter(samples)
    last = max(epochs)
    assert last >= 2, "the run is too short to show anything"
    for epoch, done in epochs.items():
        assert done == whole if epoch != last else done <= whole, f"epoch {epoch}"


def assert_bitwise_equal(one: Path, other: Path, step: int) -> None:
    """Two runs ended with the same draft, and the same state to train on from."""
    import torch

    from spec_kit.sharding import SafetensorsFolder, read_full

    weights = "draft/model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()
    mine, theirs = (
        read_full(SafetensorsFolder(run / "checkpoints" / f"step-{step}" / "state")) for run in (one, other)
    )
    assert mine.keys() == theirs.keys()
    assert any(name.startswith("optimizer.") for name in mine)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0, msg=name)


def newest_checkpoint(output: Path) -> int:
    """Its step; 0 if there is none."""
    return max((int(name.removeprefix("step-")) for name in checkpoints(output)), default=0)


def last_step(output: Path) -> int:
    lines = _whole_lines(output / "metrics.jsonl")
    return json.loads(lines[-1])["step"] if lines else 0


def _whole_lines(file: Path) -> list[str]:
    if not file.exists():
        return []
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def checkpoints(output: Path) -> set[str]:
    return {folder.parent.name for folder in (output / "checkpoints").glob("step-*/meta.json")}
