"""``spec-trainer capture --verify FOLDER``: verify every checksum of a feature folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_core.errors import ArtifactError, RunError, SpecError
from spec_trainer.offline.index import FeatureIndex, ShardEntry, read_index
from spec_trainer.offline.shard import Shard


def verify_features(root: Path) -> dict[str, Any]:
    """Verify all checksums of a feature folder, and return a summary of its contents.

    Raise ArtifactError if it is no feature folder or incomplete. Raise RunError, with the number of problems and the
    first one, if files or samples are damaged.
    """
    index = read_index(root)
    if not index.complete:
        raise ArtifactError(f"{root} is incomplete: run its capture again, it goes on")
    problems = [problem for entry in index.shards for problem in _problems(root, index, entry)]
    if problems:
        raise RunError(f"{len(problems)} damaged or missing in {root}, first: {problems[0]}")
    return {
        "features": str(root),
        "samples": index.identity.num_samples,
        "tokens": sum(sum(entry.num_tokens) for entry in index.shards),
        "shards": len(index.shards),
        "layers": list(index.identity.schema.layers),
        "sound": True,
    }


def _problems(root: Path, index: FeatureIndex, entry: ShardEntry) -> Iterator[SpecError]:
    """Yield one error if a shard's file is unusable, else one error for each damaged sample in it."""
    try:
        shard = Shard(root, entry, index.identity)
    except ArtifactError as error:
        yield error
        return
    for sample in entry.samples:
        try:
            shard.read(sample)
        except RunError as error:
            yield error
