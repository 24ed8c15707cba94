"""FeatureStore has the stored features of a run's samples, from a folder that is checked when opened.

This module imports no torch, because a folder is also opened while a command line is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError
from spec_core.wording import counted
from spec_trainer.offline.index import read_index, sample_digest
from spec_trainer.offline.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_core.records import FeatureSchema
    from spec_trainer.data.dataset import Sample
    from spec_trainer.offline.index import FeatureIndex, StoredSample
    from spec_trainer.run.spec import RunSpec


@dataclass(frozen=True)
class FeatureStore:
    """The features of every sample of a run."""

    schema: FeatureSchema
    """Schema of the stored features; it may have more layers than the run uses."""
    places: Mapping[int, tuple[Shard, StoredSample]]
    """The run's sample id -> the shard that has the sample, and the sample's position in it."""


def open_features(run: RunSpec) -> FeatureStore:
    """Open ``data.features`` for ``run``.

    Raise ArtifactError, with a message of one line, if the folder is missing, incomplete or damaged. Raise it also if
    the folder was captured with another target, if layers or dtype do not fit the draft, or if a sample was not
    captured.
    """
    assert run.config.data.features is not None
    root = Path(run.config.data.features)
    if not root.is_dir():
        raise ArtifactError(f"data.features={root}: no such folder; make one with spec-trainer capture")
    index = read_index(root)
    _check_complete(root, index)
    _check_target(root, index, run)
    _check_schema(root, index.identity.schema, run)
    shards = [Shard(root, entry, index.identity) for entry in index.shards]
    stored = {
        sample.token_digest: (shard, sample)
        for shard, entry in zip(shards, index.shards, strict=True)
        for sample in entry.samples
    }
    return FeatureStore(index.identity.schema, _places(root, stored, run))


def _places(
    root: Path, stored: Mapping[str, tuple[Shard, StoredSample]], run: RunSpec
) -> dict[int, tuple[Shard, StoredSample]]:
    samples = run.dataset.samples
    found = [(sample, stored.get(sample_digest(sample.input_ids, sample.images))) for sample in samples]
    missing = [sample for sample, place in found if place is None]
    if missing:
        raise ArtifactError(
            f"data.features={root} holds no features of {len(missing)} of {counted(len(samples), 'sample')}, first "
            f"{_name(missing[0])}: it was captured from other data or images, or with another tokenizer, chat "
            "template or data.max_length; capture this data into a new folder"
        )
    return {sample.sample_id: place for sample, place in found if place is not None}


def _name(sample: Sample) -> str:
    where = f" ({sample.where})" if sample.where else ""
    return f"sample {sample.sample_id}{where}, {counted(len(sample), 'token')}"


def _check_complete(root: Path, index: FeatureIndex) -> None:
    if not index.complete:
        raise ArtifactError(
            f"data.features={root} is incomplete: its capture was interrupted; run the capture again, it goes on"
        )


def _check_target(root: Path, index: FeatureIndex, run: RunSpec) -> None:
    if index.identity.target_digest != run.target.digest:
        raise ArtifactError(
            f"data.features={root} was captured from another target than {run.target.folder} (digest "
            f"{index.identity.target_digest[:12]}, expected {run.target.digest[:12]}); capture anew into a new folder"
        )


def _check_schema(root: Path, stored: FeatureSchema, run: RunSpec) -> None:
    wanted = run.schema
    name = f"data.features={root}"
    if missing := sorted(set(wanted.layers) - set(stored.layers)):
        raise ArtifactError(
            f"{name} holds layers {list(stored.layers)}, draft {run.config.draft.name} needs {list(wanted.layers)} "
            f"({missing} missing); capture anew with this draft into a new folder"
        )
    if (stored.dtype, stored.hidden_size) != (wanted.dtype, wanted.hidden_size):
        raise ArtifactError(
            f"{name} holds {stored.dtype} states of width {stored.hidden_size}, expected {wanted.dtype} of width "
            f"{wanted.hidden_size}; capture anew into a new folder"
        )
    if stored.sent_dtype != wanted.sent_dtype:
        raise ArtifactError(
            f"{name} was captured with data.features_dtype={stored.sent_dtype}, this run has {wanted.sent_dtype}; "
            f"set data.features_dtype={stored.sent_dtype}, or capture anew into a new folder"
        )
