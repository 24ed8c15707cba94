"""Requests outlive their process in one file, within its limits, and nothing of them is left when they are gone."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spec_core.errors import ArtifactError, RunError
from spec_trainer.configuration.follow import FollowConfig, RetentionConfig
from spec_trainer.live import retention
from spec_trainer.live.kept_request import KeptRequest, KeptRequests
from spec_trainer.live.reservoir import Reservoir
from spec_trainer.live.retention import RetainedRequests, open_retained
from spec_trainer.run.directory import RunDirectory

LONGEST, VOCABULARY = 16, 50_000


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "requests.sqlite3"


def opened(file: Path, clock: Clock | None = None, **limits: float) -> RetainedRequests:
    return RetainedRequests(file, RetentionConfig(**{"rows": 100, **limits}), clock or Clock())


def ids(number: int) -> list[int]:
    return [20_000 + number, 30_000 + number, 40_000, 7, number]


def request(number: int) -> KeptRequest:
    return KeptRequest(number, np.array(ids(number), np.int32), 3, "chat")


def kept(*numbers: int, held_out: tuple[int, ...] = (), fresh: int = 0) -> KeptRequests:
    most = max((*numbers, *held_out), default=-1)
    return KeptRequests(tuple(map(request, numbers)), tuple(map(request, held_out)), most + 1, fresh)


def read(file: Path, clock: Clock | None = None, **limits: float) -> KeptRequests:
    with opened(file, clock, **limits) as retained:
        return retained.read(LONGEST, VOCABULARY)


def numbers(found: KeptRequests) -> tuple[list[int], list[int]]:
    return [one.number for one in found.train], [one.number for one in found.held_out]


def is_on_disk(file: Path, number: int) -> bool:
    needle = np.array(ids(number), np.int32).tobytes()
    return any(needle in found.read_bytes() for found in file.parent.iterdir())


def test_a_restart_has_the_requests_and_the_counters(file) -> None:
    assert numbers(read(file)) == ([], [])
    with opened(file) as retained:
        retained.write(kept(0, 2, 3, held_out=(1, 4), fresh=2))
        retained.write(kept(2, 3, 5, held_out=(4,), fresh=3))
    found = read(file)
    assert numbers(found) == ([2, 3, 5], [4])
    assert (found.num_seen, found.num_fresh) == (6, 3)
    for one in (*found.train, *found.held_out):
        assert (one.input_ids.tolist(), one.num_prompt, one.label) == (ids(one.number), 3, "chat")
        assert one.input_ids.dtype == np.int32
    assert not is_on_disk(file, 0)
    assert is_on_disk(file, 2)


def test_a_reservoir_goes_on_as_if_it_had_not_ended(file) -> None:
    from spec_kit.live_traffic.live_requests import LiveRequest

    def filled(reservoir: Reservoir, numbers: range) -> Reservoir:
        for number in numbers:
            reservoir.add(LiveRequest(prompt=[number % 90, number // 90, 1], answer=[7, 8], label="chat"))
        return reservoir

    def empty() -> Reservoir:
        config = FollowConfig(held_out=0.3, kept=40, window=20)
        return Reservoir(config, longest=LONGEST, vocab_size=VOCABULARY, seed=1)

    one = filled(empty(), range(100))
    with opened(file) as retained:
        retained.write(one.kept)
    other = empty()
    other.restore(read(file))
    assert (other.num_seen, other.num_new, other.num_fresh) == (one.num_seen, 0, min(one.num_fresh, 40))
    for reservoir in (one, other):
        filled(reservoir, range(100, 130))
    assert other.oldest == one.oldest
    assert other.held_out_labels() == one.held_out_labels()

    def tokens(dataset) -> list[list[int]]:
        return [sample.input_ids.tolist() for sample in dataset.train]

    assert tokens(other.held_out()) == tokens(one.held_out())
    assert tokens(other.draw((), 3)) == tokens(one.draw((), 3))


def test_a_request_that_was_trained_on_never_judges() -> None:
    config = FollowConfig(held_out=0.999999)
    reservoir = Reservoir(config, longest=LONGEST, vocab_size=VOCABULARY, seed=1)
    reservoir.restore(kept(*range(20), fresh=20))
    assert numbers(reservoir.kept) == ([], [])
    assert reservoir.num_fresh == 0, "nothing is left to train on"


def test_rows_and_bytes_are_bounded_and_the_newest_stay(file) -> None:
    with opened(file, rows=3) as retained:
        retained.write(kept(*range(8), held_out=(8, 9)))
    assert numbers(read(file)) == ([7], [8, 9])
    with opened(file, bytes=2 * 20) as retained:
        retained.read(LONGEST, VOCABULARY)
        retained.write(kept(*range(8), held_out=(8, 9)))
    assert numbers(read(file)) == ([], [8, 9])
    with opened(file, rows=2000) as retained:
        retained.write(kept(*range(2000)))
        full = file.stat().st_size
        retained.write(kept(1999))
    assert file.stat().st_size < full / 4


def test_what_is_too_old_is_in_no_file_and_does_not_come_again(file, clock) -> None:
    with opened(file, clock, age_s=10) as retained:
        retained.write(kept(0, 1))
        clock.now_s += 6
        retained.write(kept(0, 1, 2))
        clock.now_s += 4
        retained.write(kept(0, 1, 2))  # the reservoir in memory still has them
        assert [is_on_disk(file, number) for number in range(3)] == [False, False, True]
        retained.write(kept(0, 1, 2, 3))
    assert numbers(read(file, clock, age_s=10)) == ([2, 3], [])
    clock.now_s += 6
    with opened(file, clock, age_s=10) as retained:
        found = retained.read(LONGEST, VOCABULARY)
        assert numbers(found) == ([3], []), "a restart does not make it younger"
        retained.write(found)
    assert [is_on_disk(file, number) for number in range(4)] == [False, False, False, True]
    clock.now_s = 0.0  # a clock that was wrong
    assert numbers(read(file, clock, age_s=10)) == ([], [])


@pytest.mark.parametrize("mask", [0, 0o22])
def test_only_its_owner_reads_the_file(file, mask) -> None:
    before = os.umask(mask)
    try:
        with opened(file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            other = sqlite3.connect(file)
            other.execute("UPDATE counters SET num_seen = 1")  # not committed: a journal is there
            assert stat.S_IMODE(file.with_name(f"{file.name}-journal").stat().st_mode) == 0o600
            other.close()
        file.chmod(0o644)
        with opened(file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        os.umask(before)


KILLED = """
import sys
from pathlib import Path
from tests.unit.trainer.live.test_retention import kept, opened
with opened(Path(sys.argv[1]), rows=200) as retained:
    print("begun", flush=True)
    number = 0
    while True:
        number += 50
        retained.write(kept(*range(number, number + 200), fresh=50))
"""


def test_a_process_killed_while_it_writes_leaves_one_of_its_states(file) -> None:
    for _ in range(2):
        words = [sys.executable, "-c", KILLED, str(file)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            first = file.stat().st_mtime_ns
            deadline = time.monotonic() + 30
            while file.stat().st_mtime_ns == first and time.monotonic() < deadline:
                pass
            process.send_signal(signal.SIGKILL)
        found = read(file, rows=200)
        if found.num_seen:
            (train, held_out), last = numbers(found), found.num_seen
            assert (train, held_out, found.num_fresh) == (list(range(last - 200, last)), [], 50)
        file.unlink()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE requests SET num_prompt = 5",
        "UPDATE requests SET num_prompt = 0",
        "UPDATE requests SET label = 'a b'",
        "UPDATE requests SET input_ids = x'010203'",
        "UPDATE requests SET input_ids = x'ffffffffffffffffffffffffffffffff'",
        "UPDATE counters SET num_fresh = 99",
        "UPDATE counters SET num_seen = 1, num_fresh = 0",
        "DELETE FROM counters",
        "CREATE TABLE other (a)",
        "CREATE TRIGGER evil AFTER DELETE ON requests BEGIN DELETE FROM counters; END",
        "DROP TABLE requests",
    ],
)
def test_a_damaged_file_is_refused_in_one_line(file, change) -> None:
    with opened(file) as retained:
        retained.write(kept(0, 1))
    database = sqlite3.connect(file)
    database.execute(change)
    database.commit()
    database.close()
    with pytest.raises(ArtifactError, match=r"requests\.sqlite3.*move it away, or remove it") as error:
        read(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"no database" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_what_is_no_database_is_refused(file, content) -> None:
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="cannot be used"):
        read(file)
    file.unlink()
    file.symlink_to(file.parent / "elsewhere")
    with pytest.raises(ArtifactError, match="is a link"):
        read(file)
    assert not (file.parent / "elsewhere").exists()


def test_requests_of_another_length_or_vocabulary_are_left_out(file) -> None:
    with opened(file) as retained:
        retained.write(kept(0, 1))
        assert numbers(retained.read(4, VOCABULARY)) == ([], [])
        assert numbers(retained.read(LONGEST, 30_000)) == ([], [])


def test_without_retention_the_file_of_a_command_before_is_removed(tmp_path) -> None:
    directory = RunDirectory(tmp_path)
    assert open_retained(directory, RetentionConfig()) is None
    assert list(tmp_path.iterdir()) == []
    retained = open_retained(directory, RetentionConfig(rows=5))
    assert retained is not None
    retained.write(kept(0))
    retained.close()
    directory.requests_journal.write_bytes(b"of a killed process")
    assert open_retained(directory, RetentionConfig()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_and_a_locked_file_are_no_reason_to_remove_it(file, monkeypatch) -> None:
    with opened(file, rows=1000) as retained:
        retained.write(kept(0, 1))
        # SQLite then says that the disk is full.
        retained._database.execute("PRAGMA max_page_count = 1").fetchall()
        with pytest.raises(RunError, match=r"requests\.sqlite3 was not written: No space left.*make room"):
            retained.write(kept(*range(1000)))
    monkeypatch.setattr(retention, "_WAIT_S", 0.01)
    other = sqlite3.connect(file)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RunError, match=r"requests\.sqlite3 cannot be used .* now: database is locked"):
        opened(file)
    other.close()
    assert numbers(read(file)) == ([0, 1], [])
