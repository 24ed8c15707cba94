"""Checkpoints of a trainer that only has state."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spec_core.errors import RunError
from spec_kit.sharding import load_sharded, save_sharded
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_testing.processes import Rank
from spec_trainer.run.draft_trainer import DraftTrainer
from spec_trainer.training.checkpoint.folder import CheckpointMeta
from spec_trainer.training.checkpoint.resume import checkpoint_to_resume
from spec_trainer.training.checkpoint.store import CheckpointStore
from spec_trainer.training.checkpoint.store import read_weights as read_weights_of


class Weights(DraftTrainer):
    """A trainer that only has state."""

    def __init__(self, value: float, size: int = 4) -> None:
        self.weight = torch.full((size,), value)
        self.step_count = torch.tensor(value)

    def state(self):
        return {"model.weight": self.weight, "optimizer.weight.step": self.step_count}

    def save(self, folder):
        save_sharded(self.state(), folder, dist.group.WORLD)

    def load(self, folder):
        load_sharded(self.state(), folder, dist.group.WORLD)


def meta(step: int) -> CheckpointMeta:
    return CheckpointMeta(step=step, identity="run", target_digest="target", acceptance_length=1.5)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_weights_of(FsdpStrategy, folder)


def save(store, step: int, best: bool = False) -> Path:
    return store.save(Weights(float(step)), meta(step), f"step: {step}\n", best)


def latest(store) -> Path | None:
    return checkpoint_to_resume(store.folder(0).parent, "latest", "run")


def names(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


def save_and_load_apart(me: Rank, folder: Path) -> tuple[float, float, list[str]]:
    """Each rank has a folder of its own, as on hosts that share none."""
    root = folder / f"of-{me.rank}"
    root.mkdir()
    with TcpRendezvous(
        "127.0.0.1:0" if me.rank == 0 else me.receive(), me.rank, me.world_size, "token", 20.0
    ) as rendezvous:
        if me.rank == 0:
            me.publish(rendezvous.address)
        store = rendezvous.join().store("x")
        dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
        checkpoints = CheckpointStore(root, keep=2, group=dist.group.WORLD, sees=me.rank == 0)
        torch.manual_seed(me.rank)
        checkpoints.save(Weights(7.0 + me.rank, 10_000), meta(3), "", best=True)
        drawn = torch.rand(1).item()
        fresh = Weights(0.0, 10_000)
        checkpoints.load(fresh, root / "step-3")
        assert torch.rand(1).item() == drawn  # each rank has its own generator again
        score = checkpoints.best_score(3)
        dist.destroy_process_group()
    return fresh.weight.unique().item(), score, sorted(path.name for path in root.iterdir())


def save_on_a_full_disk(me: Rank, root: Path) -> tuple[str, list[float], list[str]]:
    """Return what the save says that does not fit, and what is left."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = CheckpointStore(root, keep=1, group=dist.group.WORLD)
    store.save(Weights(1.0, 10_000), meta(1), "")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(RunError) as failed:
        store.save(Weights(2.0, 10_000), meta(2), "")
    fresh = Weights(0.0, 10_000)
    store.load(fresh, store.folder(1))
    dist.destroy_process_group()
    return str(failed.value), fresh.weight.unique().tolist(), sorted(path.name for path in root.iterdir())
