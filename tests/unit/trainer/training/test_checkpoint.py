"""Checkpoints: whole or not at all, rotated, the best one kept; a damaged one says so."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from spec_core.errors import ArtifactError, RunError
from spec_testing.processes import run_ranks
from spec_trainer.training.checkpoint.folder import check_whole, read_meta

from .checkpoints import (
    Weights,
    latest,
    meta,
    names,
    read_weights,
    save,
    save_and_load_apart,
    save_on_a_full_disk,
)


def test_what_was_saved_comes_back(store):
    folder = save(store, 7)
    fresh = Weights(0.0)
    assert store.load(fresh, folder).model_copy(update={"files": {}}) == meta(7)
    assert fresh.weight.tolist() == [7.0] * 4
    assert fresh.step_count.item() == 7.0
    assert (folder / "config.yaml").read_text() == "step: 7\n"
    assert read_weights(folder)["weight"].tolist() == [7.0] * 4


def test_generator_goes_on_where_it_was(store):
    torch.manual_seed(5)
    torch.rand(3)
    folder = save(store, 1)
    expected = torch.rand(3)
    torch.manual_seed(99)
    store.load(Weights(0.0), folder)
    assert torch.equal(torch.rand(3), expected)


def test_latest_is_by_number_not_by_name(store):
    assert latest(store) is None
    save(store, 9)
    save(store, 10)
    assert latest(store).name == "step-10"


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
    monkeypatch.setattr("spec_trainer.training.checkpoint.store._sync_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        save(store, 2, best=True)
    assert latest(store) == store.best()


def test_a_copy_that_somebody_has_put_there_is_none_of_the_run_s(store):
    folder = save(store, 4)
    shutil.copytree(folder, folder.with_name("step-4-kept"))
    shutil.copytree(folder, folder.with_name("step-old"))
    save(store, 5)
    save(store, 6)
    assert latest(store).name == "step-6"
    assert folder.with_name("step-4-kept").exists()


def test_a_step_is_saved_once(store):
    folder = save(store, 3)
    before = (folder / "meta.json").stat().st_mtime_ns
    assert save(store, 3) == folder
    assert (folder / "meta.json").stat().st_mtime_ns == before


def test_unfinished_folders_are_no_checkpoints(store, tmp_path):
    (tmp_path / "checkpoints" / ".step-8").mkdir()
    (tmp_path / "checkpoints" / "step-9").mkdir()
    assert latest(store) is None
    with pytest.raises(ArtifactError, match="step-9 is not a checkpoint"):
        read_meta(tmp_path / "checkpoints" / "step-9")


@pytest.mark.parametrize("content", ["{", '{"step": 1}', "[]", '{"step": 1, "colour": "red"}'])
def test_damaged_meta_is_reported(store, content):
    folder = save(store, 1)
    (folder / "meta.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"meta.json (is damaged|is not JSON|holds no JSON object)"):
        read_meta(folder)


@pytest.mark.parametrize("file", ["index.json", "rank-0.safetensors"])
def test_damaged_state_is_reported(store, file):
    folder = save(store, 1)
    (folder / "state" / file).write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"cannot be read|is not JSON"):
        store.load(Weights(0.0), folder)
    with pytest.raises(ArtifactError, match=r"cannot be read|is not JSON"):
        read_weights(folder)


def test_every_flipped_byte_is_noticed(store):
    folder = save(store, 1)
    check_whole(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {file.name for file in files} == {"meta.json", "config.yaml", "index.json", "rank-0.safetensors"}
    for file in files:
        sound = file.read_bytes()
        for position in range(0, len(sound), 1 + len(sound) // 100):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(ArtifactError, match=file.name):
                check_whole(folder)
        file.write_bytes(sound)


@pytest.mark.parametrize("file", ["meta.json", "config.yaml", "state/index.json", "state/rank-0.safetensors"])
def test_every_missing_file_is_noticed(store, file):
    folder = save(store, 1)
    (folder / file).unlink()
    with pytest.raises(ArtifactError, match=r"is missing|is not a checkpoint"):
        check_whole(folder)


def test_state_of_a_dtype_that_no_checkpoint_holds_is_refused(store, tmp_path):
    trainer = Weights(1.0)
    trainer.step_count = torch.tensor(1j)
    with pytest.raises(RunError, match=r"optimizer.weight.step@ is no tensor of a dtype"):
        store.save(trainer, meta(1), "")
    assert not list(tmp_path.glob("step-*"))


def test_all_kinds_of_tensors_come_back(store):
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "empty": torch.empty(0, 4),
        "int64": torch.arange(7),
        "strided": torch.randn(4, 6).T,
        "view": torch.randn(10)[3:6],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    trainer = Weights(1.0)
    trainer.state = lambda: {f"model.{name}": value for name, value in tensors.items()}
    folder = store.save(trainer, meta(1), "")
    found = read_weights(folder)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_full_disk_leaves_earlier_checkpoints_as_they_were(tmp_path):
    """The kernel refuses to let files grow, as it does when a disk is full."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    ((failure, weights, left),) = run_ranks(save_on_a_full_disk, 1, root)
    assert failure.startswith(f"checkpoint {root / 'step-2'} (rank 0) was not written: ")
    assert f"MB are free in {root}); raise the limit on the size of files (ulimit -f)" in failure
    assert (weights, left) == ([1.0], [".step-2", "step-1"])


def test_a_folder_that_was_removed_does_not_come_back(store, tmp_path):
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(RunError, match=r"step-2 \(rank 0\) was not written: No such file"):
        save(store, 2)
    assert not (tmp_path / "checkpoints").exists()


def test_meta_is_plain_json():
    found = json.loads(meta(3).to_json())
    assert len(found.pop("checksum")) == 32
    assert found == {
        "step": 3, "identity": "run", "target_digest": "target", "acceptance_length": 1.5, "files": {}
    }  # fmt: skip


def test_ranks_that_share_no_folder_save_and_load_by_rank_0(tmp_path, monkeypatch):
    assert run_ranks(save_and_load_apart, 2, tmp_path) == [(7.0, 1.5, ["best", "step-3"]), (7.0, 1.5, [])]
    check_whole(tmp_path / "of-0" / "step-3")
