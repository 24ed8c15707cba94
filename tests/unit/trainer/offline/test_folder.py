"""Who owns a folder of features, and what an interrupted capture leaves in it."""

from dataclasses import replace

import pytest

from spec_core.errors import ArtifactError, TargetError
from spec_trainer.offline.folder import FeatureFolder
from spec_trainer.offline.index import INDEX_FILE, read_index
from spec_trainer.offline.shard import scratch_of


def test_other_features_are_refused_and_told_apart(made):
    other = replace(made.identity, data_digest="e" * 32, shard_bytes=300)
    with pytest.raises(ArtifactError) as caught:
        made.folder.check_owner(other)
    data = f"data {made.identity.data_digest[:12]} there, eeeeeeeeeeee here"
    assert f"{data}; capture.shard_bytes 200 there, 300 here" in str(caught.value)
    made.folder.check_owner(made.identity)


def test_a_folder_of_other_things_is_refused(made, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").touch()
    with pytest.raises(ArtifactError, match=r"is not empty \(diary.txt\) and holds no features"):
        FeatureFolder(tmp_path / "home").check_owner(made.identity)
    with pytest.raises(ArtifactError, match="is a file"):
        FeatureFolder(tmp_path / "home" / "diary.txt").check_owner(made.identity)
    with pytest.raises(ArtifactError, match="is not a folder that can be written to"):
        FeatureFolder(tmp_path / "home" / "diary.txt" / "features").check_owner(made.identity)


def test_a_deleted_index_is_made_anew_from_the_shards(made):
    before = read_index(made.folder.root)
    (made.folder.root / INDEX_FILE).unlink()
    made.folder.check_owner(made.identity)
    made.folder.open(made.identity)
    assert not read_index(made.folder.root).complete
    made.folder.seal(made.identity, 2)
    assert read_index(made.folder.root) == before


def test_shards_of_another_capture_are_refused(made):
    (made.folder.root / INDEX_FILE).unlink()
    other = replace(made.identity, data_digest="e" * 32)
    with pytest.raises(ArtifactError, match=r"features-00000.safetensors is of another capture"):
        made.folder.check_shards(other, 2)


def test_half_a_shard_does_not_count_and_is_removed(made):
    file = made.folder.shard(1)
    half = scratch_of(file)
    file.rename(half)
    half.with_name(".tmp8xd45V").touch()  # what safetensors writes to before it renames
    assert [made.folder.has(number) for number in range(2)] == [True, False]
    made.folder.open(made.identity)
    assert not half.parent.exists()


def test_a_second_capture_is_kept_out(made):
    with (
        made.folder.locked(),
        pytest.raises(ArtifactError, match="is in use by a capture"),
        made.folder.locked(),
    ):
        pass


def test_a_refused_capture_leaves_no_folder(tmp_path, made):
    folder = FeatureFolder(tmp_path / "new")
    with pytest.raises(TargetError), folder.locked():
        raise TargetError("the engine cannot load it")
    assert not folder.root.exists()
    with pytest.raises(TargetError), made.folder.locked():
        raise TargetError("the engine cannot load it")
    assert made.folder.has(0)
