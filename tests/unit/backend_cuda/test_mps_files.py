"""Files of MPS: sockets of its daemon, and shared events that ended processes leave."""

import mmap
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spec_backend_cuda import mps_owner


@pytest.mark.parametrize("length", [10, 65, 66, 79, 90])
def test_the_sockets_of_a_daemon_have_names_that_are_short_enough(monkeypatch, length):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    pipe = Path(
        mps_owner.mps_environment(mps_owner.folders() / f"{mps_owner.PREFIX}12345678")[mps_owner.PIPE]
    )
    assert len(str(pipe / "control_privileged")) < 108


def test_shared_events_of_ended_processes_are_forgotten_and_no_others(monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    started_s = time.time()
    monkeypatch.setattr(mps_owner, "END_S", 0.2)
    files = [
        Path(f"/dev/shm/cuda.shm.{os.geteuid():x}.{pid:x}.{number}")
        for pid, number in ((ended.pid, 1), (os.getpid(), 1), (ended.pid, 2), (ended.pid, 3))
    ]
    _, _, old, of_another_container = files
    try:
        for file in files:
            file.write_bytes(b"event")
        os.utime(old, (started_s - 60, started_s - 60))
        with of_another_container.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            file.close()
            mps_owner.forget_events(started_s - 1)
        assert [file.exists() for file in files] == [False, True, True, True]
        mps_owner.forget_events(started_s - 1)
        assert not of_another_container.exists()
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_runs_that_end_at_once_forget_events_beside_each_other():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file = Path(f"/dev/shm/cuda.shm.{os.geteuid():x}.{ended.pid:x}.1")
    file.write_bytes(b"event")
    with ThreadPoolExecutor(2) as threads:
        with file.open("rb"):
            calls = [threads.submit(mps_owner.forget_events, time.time() - 1) for _ in range(2)]
            time.sleep(0.1)  # both have looked
        for call in calls:
            call.result()
    assert not file.exists()
