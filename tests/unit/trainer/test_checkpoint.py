"""Checkpoints: whole or not at all, rotated, the best one kept; a damaged one says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from spec_core import DraftTrainer
from spec_core.errors import ArtifactError, RunError
from spec_trainer.checkpoint import CheckpointMeta, CheckpointStore, read_meta, read_model_state

if TYPE_CHECKING:
    from collections.abc import Iterator


class Weights(DraftTrainer):
    """A trainer that only has state."""

    def __init__(self, value: float, size: int = 4) -> None:
        self.weight = torch.full((size,), value)
        self.step_count = torch.tensor(value)

    def state_dict(self):
        return {"model": {"weight": self.weight}, "optimizer": {"weight": {"step": self.step_count}}}

    def load_state_dict(self, state):
        self.weight = state["model"]["weight"]
        self.step_count = state["optimizer"]["weight"]["step"]

    def step(self, share, lr): ...
    def evaluate(self, share): ...
    def named_weights(self): ...
    def export(self, target, folder): ...


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def store(group, tmp_path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", keep=2, group=group)


def meta(step: int) -> CheckpointMeta:
    return CheckpointMeta(step=step, identity="run", target_digest="target", acceptance_length=1.5)


def save(store, step: int, best: bool = False) -> Path:
    return store.save(Weights(float(step)), meta(step), f"step: {step}\n", best)


def names(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_what_was_saved_comes_back(store):
    folder = save(store, 7)
    fresh = Weights(0.0)
    assert store.load(fresh, folder) == meta(7)
    assert fresh.weight.tolist() == [7.0] * 4
    assert fresh.step_count.item() == 7.0
    assert (folder / "config.yaml").read_text() == "step: 7\n"
    assert read_model_state(folder)["weight"].tolist() == [7.0] * 4


def test_generator_goes_on_where_it_was(store):
    torch.manual_seed(5)
    torch.rand(3)
    folder = save(store, 1)
    expected = torch.rand(3)
    torch.manual_seed(99)
    store.load(Weights(0.0), folder)
    assert torch.equal(torch.rand(3), expected)


def test_latest_is_by_number_not_by_name(store):
    assert store.latest() is None
    save(store, 9)
    save(store, 10)
    assert store.latest().name == "step-10"


def test_rotation_keeps_the_newest_and_the_best(store, tmp_path):
    save(store, 1, best=True)
    for step in (2, 3, 4):
        save(store, step)
    assert names(tmp_path) == {"step-1", "step-3", "step-4", "best"}
    assert store.best().name == "step-1"
    save(store, 5, best=True)
    assert names(tmp_path) == {"step-4", "step-5", "best"}
    assert store.best().name == "step-5"


def test_no_crash_parts_the_best_one_from_its_mark(store, monkeypatch):
    def crash(folder: Path) -> None:
        raise KeyboardInterrupt

    save(store, 1, best=True)
    monkeypatch.setattr("spec_trainer.checkpoint._sync_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        save(store, 2, best=True)
    assert store.latest() == store.best()


def test_a_copy_that_somebody_has_put_there_is_none_of_the_run_s(store):
    folder = save(store, 4)
    shutil.copytree(folder, folder.with_name("step-4-kept"))
    shutil.copytree(folder, folder.with_name("step-old"))
    save(store, 5)
    save(store, 6)
    assert store.latest().name == "step-6"
    assert folder.with_name("step-4-kept").exists()


def test_a_step_is_saved_once(store):
    folder = save(store, 3)
    before = (folder / "meta.json").stat().st_mtime_ns
    assert save(store, 3) == folder
    assert (folder / "meta.json").stat().st_mtime_ns == before


def test_unfinished_folders_are_no_checkpoints(store, tmp_path):
    (tmp_path / "checkpoints" / ".step-8").mkdir()
    (tmp_path / "checkpoints" / "step-9").mkdir()
    assert store.latest() is None
    with pytest.raises(ArtifactError, match="step-9 is not a checkpoint"):
        read_meta(tmp_path / "checkpoints" / "step-9")


@pytest.mark.parametrize("content", ["{", '{"step": 1}', "[]", '{"step": 1, "colour": "red"}'])
def test_damaged_meta_is_told(store, content):
    folder = save(store, 1)
    (folder / "meta.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"meta.json is damaged"):
        read_meta(folder)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_damaged_state_is_told(store, file):
    folder = save(store, 1)
    (folder / "state" / file).write_bytes(b"x")
    with pytest.raises(ArtifactError, match="cannot be read"):
        store.load(Weights(0.0), folder)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_model_state(folder)


def test_damaged_generator_is_told(store):
    folder = save(store, 1)
    (folder / "generator-0.pt").write_bytes(b"")
    with pytest.raises(ArtifactError, match="cannot be read"):
        store.load(Weights(0.0), folder)


@pytest.mark.filterwarnings("ignore:.*single process")
def test_a_flipped_bit_in_the_metadata_is_told_or_harmless(store):
    folder = save(store, 1)
    file = folder / "state" / ".metadata"
    sound = file.read_bytes()
    for position in range(0, len(sound), 5):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with suppress(ArtifactError):
            read_model_state(folder)


_FULL_DISK = """
import resource, sys
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_checkpoint import CheckpointStore, Weights, meta
from spec_core.errors import RunError

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
root = Path(sys.argv[2])
store = CheckpointStore(root, keep=1, group=dist.group.WORLD)
store.save(Weights(1.0, 10_000), meta(1), "")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    store.save(Weights(2.0, 10_000), meta(2), "")
except RunError as error:
    print(error)
fresh = Weights(0.0, 10_000)
store.load(fresh, store.latest())
print(fresh.weight.unique().tolist(), sorted(path.name for path in root.iterdir()))
dist.destroy_process_group()
"""


def test_full_disk_leaves_earlier_checkpoints_as_they_were(tmp_path):
    """The kernel refuses to let files grow, as it does when a disk is full."""
    (tmp_path / "checkpoints").mkdir()
    folder = str(Path(__file__).parent)
    child = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, folder, str(tmp_path / "checkpoints")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    failure, left = child.stdout.splitlines()
    assert failure.startswith(f"checkpoint {tmp_path / 'checkpoints' / 'step-2'} was not written (rank 0): ")
    assert f"MB are free in {tmp_path / 'checkpoints'})" in failure
    assert left == "[1.0] ['step-1']"


def test_a_folder_that_was_removed_does_not_come_back(store, tmp_path):
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(RunError, match=r"step-2 was not written \(rank 0\): FileNotFoundError"):
        save(store, 2)
    assert not (tmp_path / "checkpoints").exists()


def test_meta_is_plain_json():
    assert json.loads(meta(3).to_json()) == {
        "step": 3, "identity": "run", "target_digest": "target", "acceptance_length": 1.5
    }  # fmt: skip
