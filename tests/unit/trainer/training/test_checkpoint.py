"""Checkpoints: whole or not at all, rotated, the best one kept; a damaged one says so."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spec_core.errors import ArtifactError, RunError
from spec_kit.sharding import load_sharded, save_sharded
from spec_kit.sharding.safetensors_folder import new_digest
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_testing.processes import Rank, run_ranks
from spec_trainer.run.draft_trainer import DraftTrainer
from spec_trainer.training.checkpoint.folder import CheckpointMeta, check_whole, read_meta
from spec_trainer.training.checkpoint.resume import CommandCheckpoints, checkpoint_to_resume
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


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_weights_of(FsdpStrategy, folder)


def save(store, step: int, best: bool = False) -> Path:
    return store.save(Weights(float(step)), meta(step), f"step: {step}\n", best)


def latest(store) -> Path | None:
    return checkpoint_to_resume(store.folder(0).parent, "latest", "run")


def names(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


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


# --- which one is resumed ---------------------------------------------------------------------------------------


@pytest.fixture
def three(store) -> CheckpointStore:
    store._keep = 3
    for step in (1, 2, 3):
        save(store, step)
    return store


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


def test_a_future_that_was_given_up_is_written_anew_and_rotates_nothing_away(three):
    three.load(Weights(0.0), three.folder(1))
    three._keep = 1
    damage(three.folder(3))
    save(three, 2)
    assert latest_names(three) == ["step-2", "step-3"]
    save(three, 3)
    assert latest_names(three) == ["step-3"]
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
store.load(fresh, store.folder(1))
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
    assert failure.startswith(f"checkpoint {tmp_path / 'checkpoints' / 'step-2'} (rank 0) was not written: ")
    assert (
        f"MB are free in {tmp_path / 'checkpoints'}); raise the limit on the size of files (ulimit -f)"
        in failure
    )
    assert left == "[1.0] ['.step-2', 'step-1']"


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


def test_ranks_that_share_no_folder_save_and_load_by_rank_0(tmp_path, monkeypatch):
    assert run_ranks(save_and_load_apart, 2, tmp_path) == [(7.0, 1.5, ["best", "step-3"]), (7.0, 1.5, [])]
    check_whole(tmp_path / "of-0" / "step-3")
