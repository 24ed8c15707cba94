"""A folder for checkpoints, and a group of one process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from spec_trainer.training.checkpoint.store import CheckpointStore


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def store(group, tmp_path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", keep=2, group=group)
