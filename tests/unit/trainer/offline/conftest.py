"""Features in folders: made by hand, and by a capture of a tiny target."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_core.records import DraftBatch, FeatureSchema
from spec_trainer.cli.commands.capture import resolve_capture, run_capture
from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.packing import empty_batch
from spec_trainer.data.report import DataReport
from spec_trainer.offline.folder import FeatureFolder
from spec_trainer.offline.index import INDEX_FILE, FeatureIdentity, data_digest, digest

SHARD_BYTES = 40_000
"""Seven samples of ten tokens: the 20 samples of ``words`` make three shards."""


@dataclass(frozen=True)
class Made:
    """Two shards of random features, and what they were made of."""

    folder: FeatureFolder
    identity: FeatureIdentity
    batches: list[DraftBatch]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    from spec_trainer.offline.shard import write_shard

    schema = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="bfloat16")
    draw = np.random.default_rng(0)
    parts = [
        [
            Sample(number, draw.integers(0, 97, size, dtype=np.int32), np.ones(size, dtype=bool))
            for number, size in sizes
        ]
        for sizes in ([(0, 3), (1, 5)], [(2, 1), (3, 4)])
    ]
    dataset = Dataset((*parts[0], *parts[1]), (), DataReport())
    identity = FeatureIdentity(
        schema=schema,
        target_digest="t" * 40,
        data_digest=data_digest(dataset),
        num_samples=4,
        shard_bytes=200,
    )
    folder = FeatureFolder(tmp_path / "made")
    batches = []
    with folder.locked():
        folder.open(identity)
        for shard, samples in enumerate(parts):
            batches.append(empty_batch(samples, schema, packing=True, seed=0, epoch=0))
            batches[-1].hidden_TNH.copy_(
                torch.from_numpy(draw.normal(size=tuple(batches[-1].hidden_TNH.shape)))
            )
            write_shard(folder.shard(shard), batches[-1], identity)
        folder.seal(identity, len(parts))
    return Made(folder, identity, batches)


def flip(file: Path, position: int) -> None:
    """Change a bit of a file."""
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def forge(root: Path, **changes: object) -> None:
    """Give the index other values and the checksum that goes with them; a key "shard__x" is of the first shard."""
    body = json.loads((root / INDEX_FILE).read_text())
    del body["checksum"]
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        {"": body, "shard": body["shards"][0], "schema": body["schema"]}[section][name] = value
    text = json.dumps(body, sort_keys=True)
    (root / INDEX_FILE).write_text(json.dumps({"checksum": digest(text.encode()), **body}))


@pytest.fixture
def capture(words: list[str], tmp_path: Path) -> Callable[..., Path]:
    """``capture(*overrides)``: the folder of the features of the run of ``words``, in three shards."""

    def run(*overrides: str) -> Path:
        folder = tmp_path / "features"
        own = [f"output={folder}", f"capture.shard_bytes={SHARD_BYTES}", *overrides]
        run_capture(resolve_capture(None, {}, [*words, *own]))
        return folder

    return run
