"""The MPS guard with a stand-in for NVIDIA's daemon: a program of that name that stays until it is told to quit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_backend_cuda import mps_guard
from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_backend_cuda.mps import MpsUnavailable, mps_daemon, thread_percentage
from spec_core.errors import RunError

DAEMON = """#!{python} -I
import os, signal, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
if sys.argv[1:] == ["-d"]:
    print("devices:", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if "{fault}" == "refuses":
        sys.exit("An instance of this daemon is already running")
    if os.fork() == 0:
        os.setsid()
        with open(os.path.join(folder, "pid"), "w") as file:
            file.write(str(os.getpid()))
        while True:
            time.sleep(1)
    while not os.path.exists(os.path.join(folder, "pid")):
        time.sleep(0.01)
elif sys.stdin.read().startswith("quit") and "{fault}" != "deaf":
    with open(os.path.join(folder, "pid")) as file:
        os.kill(int(file.read()), signal.SIGTERM)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs the stand-in, with a fault or without, and a temporary folder that only this test uses."""

    def install(fault: str = "") -> None:
        program = tmp_path / "bin" / mps_guard.CONTROL
        program.parent.mkdir(exist_ok=True)
        program.write_text(DAEMON.format(python=sys.executable, fault=fault))
        program.chmod(0o755)

    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(mps_guard, "folders", lambda: folder)
    monkeypatch.setattr(mps_guard, "_TRY_A_CLIENT", "pass")
    monkeypatch.setattr(mps_guard, "END_S", 0.3)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    install()
    return install


def daemons(folder: Path) -> list[int]:
    return [pid for each in folder.glob("*mps*") for pid in mps_guard.processes(each)]


def test_a_daemon_starts_in_folders_of_its_own_and_ends_with_them(install, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    folder = mps_guard.own_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert mps_guard.start(folder) == ""
    assert (folder / "log" / "start").read_text().strip() == "devices: None"
    assert len(mps_guard.processes(folder)) == 1
    mps_guard.stop(folder)
    assert mps_guard.processes(folder) == []
    assert list((tmp_path / "t").iterdir()) == []


def test_a_daemon_that_does_not_quit_is_killed(install):
    install("deaf")
    folder = mps_guard.own_folder()
    mps_guard.start(folder)
    (pid,) = mps_guard.processes(folder)
    mps_guard.stop(folder)
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not folder.exists()


def test_why_a_daemon_does_not_start_is_said(install):
    install("refuses")
    folder = mps_guard.own_folder()
    assert "exit code 1: devices: None\nAn instance of this daemon is already running" in mps_guard.start(
        folder
    )
    mps_guard.stop(folder)


def test_what_a_killed_guard_left_is_swept_and_what_is_in_use_stays(install):
    left, used = mps_guard.own_folder(), mps_guard.own_folder()
    mps_guard.start(left)
    mps_guard.start(used)
    (survivor,) = mps_guard.processes(used)
    _let_go_of_lock(left)
    mps_guard.sweep()
    assert not left.exists()
    assert daemons(used.parent) == [survivor]
    mps_guard.stop(used)


def _let_go_of_lock(folder: Path) -> None:
    """What the kernel does when the process that holds it dies."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"{folder.name}/owner"):
                os.close(descriptor)
        except OSError:
            continue


def test_a_daemon_without_a_working_client_is_ended_and_the_reason_told(install, tmp_path):
    """The whole guard process: there is no CUDA here, so the client that it tries fails."""
    with pytest.raises(MpsUnavailable, match=r"a process under MPS cannot start CUDA"), mps_daemon():
        pass
    assert list((tmp_path / "t").iterdir()) == []


def test_the_guard_ends_its_daemon_when_the_launcher_is_killed(install, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(mps_guard.__file__).parents[1])!r})\n"
        "from spec_backend_cuda import mps, mps_guard\n"
        f"mps_guard.__file__ = {str(_guard_without_cuda(tmp_path))!r}\n"
        "with mps.mps_daemon() as daemon:\n"
        "    print(daemon.environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(launcher)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip()).parent
        assert len(mps_guard.processes(folder)) == 1
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    assert daemons(tmp_path / "t") == []


def test_a_daemon_that_is_killed_is_told_of_and_the_run_fails_of_it(install, tmp_path, monkeypatch):
    monkeypatch.setattr(mps_guard, "__file__", str(_guard_without_cuda(tmp_path)))
    backend = CudaBackend(CudaConfig(name="cuda"))
    with backend.prepare_host("colocated"):
        backend.check_host()
        (pid,) = daemons(tmp_path / "t")
        time.sleep(3 * mps_guard.WATCH_S)  # the guard has seen it
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError, match=rf"^{mps_guard.CONTROL} \(pid {pid}\) died: .*MPS"):
            until_it_fails(backend)
    assert list((tmp_path / "t").iterdir()) == []
    backend.check_host()


def test_shared_events_of_ended_processes_are_forgotten_and_no_others(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    started_s = time.time()
    mine, theirs, old = (
        Path(f"/dev/shm/cuda.shm.{os.geteuid():x}.{pid:x}.{number}")
        for pid, number in ((ended.pid, 1), (os.getpid(), 1), (ended.pid, 2))
    )
    try:
        for file in (mine, theirs, old):
            file.touch()
        os.utime(old, (started_s - 60, started_s - 60))
        mps_guard.forget_events(started_s - 1)
        assert [file.exists() for file in (mine, theirs, old)] == [False, True, True]
    finally:
        for file in (mine, theirs, old):
            file.unlink(missing_ok=True)


def until_it_fails(backend: CudaBackend) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        backend.check_host()
        time.sleep(0.05)


def _guard_without_cuda(tmp_path: Path) -> Path:
    """The guard's own file, its trial of a client left out: there is no CUDA here."""
    source = Path(mps_guard.__file__).read_text()
    line = next(line for line in source.splitlines() if line.startswith("_TRY_A_CLIENT"))
    copy = tmp_path / "guard.py"
    copy.write_text(source.replace(line, "_TRY_A_CLIENT = 'pass'"))
    return copy


@pytest.mark.parametrize(
    ("share", "percentage"), [(0.5, "50"), (1 / 3, "34"), (0.29, "29"), (1.0, "100"), (0.001, "1")]
)
def test_shares_are_rounded_up_to_whole_percentages(share, percentage):
    assert thread_percentage(share) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage}
