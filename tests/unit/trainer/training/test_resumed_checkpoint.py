"""Which checkpoint a run goes on from: the newest whole one of this run; others are named with what to do."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from spec_core.errors import ArtifactError
from spec_kit.sharding.safetensors_folder import new_digest
from spec_trainer.training.checkpoint.folder import check_whole
from spec_trainer.training.checkpoint.resume import CommandCheckpoints, checkpoint_to_resume
from spec_trainer.training.checkpoint.store import CheckpointStore

from .checkpoints import Weights, latest, read_weights, save


@pytest.fixture
def three(store, group) -> CheckpointStore:
    found = CheckpointStore(store.folder(0).parent, keep=3, group=group)
    for step in (1, 2, 3):
        save(found, step)
    return found


def damage(folder: Path) -> None:
    file = folder / "state" / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_newest_one_is_named_with_what_to_do(three, tmp_path):
    damage(three.folder(3))
    folder = three.folder(3)
    with pytest.raises(ArtifactError) as caught:
        latest(three)
    assert str(caught.value) == (
        f"{folder / 'state' / 'rank-0.safetensors'} is damaged: its checksum is not the one in meta.json; go on from "
        f"step-2 with --resume-from previous, or delete {folder}"
    )


def test_previous_is_the_newest_whole_one_before_the_newest(three):
    root = three.folder(0).parent
    assert checkpoint_to_resume(root, "previous", "run") == three.folder(2)
    damage(three.folder(2))
    assert checkpoint_to_resume(root, "previous", "run") == three.folder(1)
    damage(three.folder(1))
    with pytest.raises(ArtifactError, match=r"train.resume_from=previous: .* has no whole checkpoint before"):
        checkpoint_to_resume(root, "previous", "run")


def test_a_checkpoint_can_be_named(three):
    root = three.folder(0).parent
    assert checkpoint_to_resume(root, "step-1", "run") == three.folder(1)
    with pytest.raises(ArtifactError, match=r"train.resume_from=step-9: .* only step-1, step-2, step-3"):
        checkpoint_to_resume(root, "step-9", "run")
    damage(three.folder(1))
    with pytest.raises(ArtifactError, match=r"no earlier checkpoint is there: delete .*step-1 to start anew"):
        checkpoint_to_resume(root, "step-1", "run")


def test_a_named_one_that_is_damaged_is_told_with_the_one_before_it(three):
    damage(three.folder(2))
    with pytest.raises(
        ArtifactError, match=r"go on from step-1 with --resume-from step-1, or delete .*step-2$"
    ):
        checkpoint_to_resume(three.folder(0).parent, "step-2", "run")


def test_a_checkpoint_under_the_name_of_another_is_noticed(three):
    one, two = three.folder(1), three.folder(2)
    one.rename(one.with_name("aside"))
    two.rename(one)
    one.with_name("aside").rename(two)
    with pytest.raises(ArtifactError, match=r"step-2 holds the checkpoint of step 1; go on from step-1"):
        checkpoint_to_resume(one.parent, "step-2", "run")


def test_a_checkpoint_of_another_run_is_noticed(three):
    with pytest.raises(ArtifactError, match=r"step-3 is a checkpoint of another run; go on from step-2"):
        checkpoint_to_resume(three.folder(0).parent, "latest", "another run")


@pytest.mark.parametrize("resume_from", ["previous", "step-1"])
def test_a_command_begins_again_at_what_it_has_written_itself(three, resume_from):
    """The checkpoints after the first are of a future that was given up, and may be damaged."""
    damage(three.folder(3))
    command = CommandCheckpoints(three.folder(0).parent, resume_from, "run")
    assert command.newest() == command.first
    three.load(Weights(0.0), command.first)
    save(three, 2)
    assert command.newest() == three.folder(2)
    save(three, 3)
    assert command.newest() == three.folder(3)


def test_a_command_passes_over_a_checkpoint_of_its_own_that_was_damaged(store, caplog):
    command = CommandCheckpoints(store.folder(0).parent, "latest", "run")
    assert command.first is command.newest() is None
    save(store, 1)
    save(store, 2)
    damage(store.folder(2))
    assert command.newest() == store.folder(1)
    assert "step-2/state/rank-0.safetensors is damaged" in caplog.text


def test_a_command_that_lost_the_checkpoint_it_began_with_says_so(three):
    command = CommandCheckpoints(three.folder(0).parent, "previous", "run")
    damage(three.folder(2))
    with pytest.raises(ArtifactError, match=r"is damaged.*; go on from step-1 with --resume-from step-1"):
        command.newest()


@pytest.mark.parametrize("elsewhere", ["a folder", "nothing", "a file"])
def test_a_link_under_the_name_of_a_step_is_written_anew(three, tmp_path, elsewhere):
    target = tmp_path / "elsewhere"
    three.folder(3).rename(target)
    if elsewhere != "a folder":
        shutil.rmtree(target)
    if elsewhere == "a file":
        target.touch()
    three.folder(3).symlink_to(target)
    three.load(Weights(0.0), three.folder(2))
    save(three, 3)
    assert not three.folder(3).is_symlink()
    assert latest(three) == three.folder(3)
    assert target.exists() == (elsewhere != "nothing")
    assert not list(target.parent.glob("checkpoints/.*"))


def test_one_without_meta_is_passed_over_with_a_word_and_written_again(three, caplog):
    (three.folder(3) / "meta.json").unlink()
    assert latest(three) == three.folder(2)
    assert f"{three.folder(3)} has no meta.json" in caplog.text
    three.load(Weights(0.0), three.folder(2))
    save(three, 3)
    assert latest(three) == three.folder(3)


def test_a_best_one_that_is_damaged_or_of_a_given_up_future_does_not_count(store, caplog):
    save(store, 3, best=True)
    assert store.best_score(3) == 1.5
    assert store.best_score(2) == 0.0
    meta_file = store.folder(3) / "meta.json"
    meta_file.write_bytes(meta_file.read_bytes()[:-9])
    assert store.best_score(3) == 0.0
    with suppress(ArtifactError):
        CommandCheckpoints(store.folder(0).parent, "latest", "run")
    assert "best/meta.json is not JSON" in caplog.text
    assert "no best checkpoint is known before the next evaluation" in caplog.text


def test_a_best_one_that_was_copied_as_a_folder_gives_way_to_a_new_one(store, tmp_path):
    folder = save(store, 3, best=True)
    link = tmp_path / "checkpoints" / "best"
    link.unlink()
    shutil.copytree(folder, link)
    assert store.best_score(3) == 1.5
    save(store, 4, best=True)
    assert link.is_symlink()
    assert store.best() == store.folder(4)


def test_best_that_lost_its_meta_is_no_best(store):
    folder = save(store, 3, best=True)
    (folder / "meta.json").unlink()
    assert store.best() is None


def test_a_future_that_was_given_up_is_written_anew_and_rotates_nothing_away(three, group):
    store = CheckpointStore(three.folder(0).parent, keep=1, group=group)
    store.load(Weights(0.0), store.folder(1))
    damage(store.folder(3))
    save(store, 2)
    assert latest_names(store) == ["step-2", "step-3"]
    save(store, 3)
    assert latest_names(store) == ["step-3"]
    check_whole(three.folder(3))


def latest_names(store) -> list[str]:
    return sorted(folder.name for folder in store.folder(0).parent.glob("step-*"))


def reseal(folder: Path, **changes) -> None:
    """Write a meta.json whose digests fit, as whoever forges a checkpoint does."""
    body = json.loads((folder / "meta.json").read_text())
    del body["checksum"]
    body |= changes
    body["files"] = {name: new_digest((folder / name).read_bytes()).hexdigest() for name in body["files"]}
    checksum = new_digest(json.dumps(body).encode()).hexdigest()
    (folder / "meta.json").write_text(json.dumps({**body, "checksum": checksum}, indent=2) + "\n")


@pytest.mark.parametrize("step", [-1, 7, 10**30])
def test_a_step_that_is_not_the_folder_s_is_refused(three, step):
    reseal(three.folder(3), step=step)
    with pytest.raises(ArtifactError, match=r"meta\.json is damaged|holds the checkpoint of step 7"):
        latest(three)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dtype", "nn", "'nn' is no dtype"),
        ("dtype", "float16", "index.json says torch.float16"),
        ("shape", [10**12], "do not make a tensor of shape [1000000000000]"),
        ("shape", [3], "lies outside of shape [3]"),
        ("shape", [2, 2], "is none of a tensor of shape [2, 2]"),
        ("parts", [], "do not make a tensor"),
    ],
)
def test_a_forged_index_of_a_checkpoint_is_refused(three, key, value, said):
    folder = three.folder(3)
    file = folder / "state" / "index.json"
    index = json.loads(file.read_text())
    index["model.weight"][key] = value
    file.write_text(json.dumps(index))
    reseal(folder)
    for read in (read_weights, lambda folder: three.load(Weights(0.0), folder)):
        with pytest.raises(ArtifactError, match=re.escape(said)) as raised:
            read(folder)
        assert "index.json" in str(raised.value)


def test_a_state_that_is_a_pickle_is_one_line(store):
    folder = save(store, 1)
    (folder / "state" / ".metadata").write_bytes(b"\x80\x02.")
    with pytest.raises(ArtifactError, match=r"\.metadata is damaged: meta\.json does not list it"):
        check_whole(folder)
