"""The folder that a capture makes, in one process: what is in it, and how it goes on."""

import shutil
from collections import namedtuple

import pytest

from spec_core.errors import ArtifactError, ConfigError, RunError
from spec_trainer.cli.commands.capture import resolve_capture, run_capture
from spec_trainer.offline.index import read_index
from spec_trainer.offline.verify import verify_features

from .conftest import flip


def files(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_every_sample_is_there_once_held_out_ones_too(capture):
    index = read_index(capture("data.eval_samples=4"))
    stored = [sample.sample_id for entry in index.shards for sample in entry.samples]
    assert stored == list(range(20))
    assert len(index.shards) == 3
    assert all(sum(entry.num_tokens) * (4 * 32 * 4 + 8) <= 40_000 for entry in index.shards)


def test_a_sample_larger_than_a_shard_has_one_of_its_own(capture):
    index = read_index(capture("capture.shard_bytes=1"))
    assert [len(entry.samples) for entry in index.shards] == [1] * 20


def test_a_deleted_shard_is_captured_again_and_only_it(capture, words):
    folder = capture()
    before = files(folder)
    removed = folder / "features-00001.safetensors"
    retained = {file: file.stat().st_mtime_ns for file in folder.glob("*.safetensors") if file != removed}
    removed.unlink()
    own = [f"output={folder}", "capture.shard_bytes=40000"]
    document = run_capture(resolve_capture(None, {}, [*words, *own]))
    assert document["captured_shards"] == 1
    assert document["shards"] == 3
    assert files(folder) == before
    assert {file: file.stat().st_mtime_ns for file in retained} == retained
    assert run_capture(resolve_capture(None, {}, [*words, *own]))["captured_shards"] == 0


def test_other_features_in_the_folder_are_refused(capture, make_target):
    capture()
    for key, difference in {
        f"target={make_target('llama', initializer_range=0.3)}": "target .* there, .* here",
        "draft.layers=[1,4]": r"layers \[2, 4, 5, 8\] there, \[1, 4, 8\] here",
        "data.max_length=9": "data .* there, .* here",
        "capture.shard_bytes=50000": "capture.shard_bytes 40000 there, 50000 here",
        "data.features_dtype=fp8_e4m3": "data.features_dtype target there, fp8_e4m3 here",
    }.items():
        with pytest.raises(ArtifactError, match=difference):
            capture(key)


def test_masks_ranks_and_seed_do_not_matter(capture):
    folder = capture()
    before = files(folder)
    capture("data.last_turn_only=true", "train.lr=0.1", "seed=3", "placement.kind=disaggregated")
    assert files(folder) == before


def test_capture_from_features_makes_no_sense(capture):
    with pytest.raises(ConfigError, match=r"data.features=x with capture: it makes such a folder"):
        capture("data.features=x")


def test_a_full_disk_is_told_before_anything_is_made(capture, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 1 << 40, 103_999))
    with pytest.raises(
        ArtifactError, match="needs 104000 bytes for the features of 20 samples, 103999 are free"
    ):
        capture()
    assert not (tmp_path / "features").exists()


def test_verify_finds_what_is_damaged(capture):
    folder = capture()
    assert verify_features(folder)["sound"]
    for number in (0, 2):
        file = folder / f"features-0000{number}.safetensors"
        flip(file, file.stat().st_size // 2)
    with pytest.raises(
        RunError, match=r"2 damaged or missing in .*, first: .*features-00000\.safetensors: .*sample"
    ):
        verify_features(folder)
    (folder / "features-00001.safetensors").unlink()
    with pytest.raises(RunError, match="3 damaged or missing"):
        verify_features(folder)
