"""The MPS owner with a stand-in for NVIDIA's daemon: a program of that name that stays until it is told to quit."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from spec_backend_cuda import mps_owner
from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_backend_cuda.mps import MpsUnavailable, mps_daemon, thread_percentage
from spec_core.errors import RunError

DAEMON = """#!{python} -I
import os, signal, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
if sys.argv[1:] == ["-d"]:
    print("devices:", os.environ.get("CUDA_VISIBLE_DEVICES"))
    print("MPS:", sorted(name for name in os.environ if name.startswith("CUDA_MPS")))
    if "{fault}" == "hangs":
        time.sleep(60)
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
def client():
    """The program that tries MPS, which ``install`` puts aside."""
    return mps_owner._TRY_A_CLIENT


@pytest.fixture
def temporary():
    """A temporary folder that only this test uses; pytest's own names are too long for a daemon's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def install(temporary, tmp_path, monkeypatch, client):
    """Installs the stand-in, with a fault or without."""

    def install(fault: str = "") -> None:
        program = tmp_path / "bin" / mps_owner.CONTROL
        program.parent.mkdir(exist_ok=True)
        program.write_text(DAEMON.format(python=sys.executable, fault=fault))
        program.chmod(0o755)

    monkeypatch.setattr(mps_owner, "folders", lambda: temporary)
    monkeypatch.setattr(mps_owner, "_TRY_A_CLIENT", "pass")
    monkeypatch.setattr(mps_owner, "END_S", 0.3)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    install()
    return install


def daemons(folder: Path) -> list[int]:
    return [pid for each in folder.glob("*mps*") for pid in mps_owner.processes(each)]


def test_a_daemon_starts_in_folders_of_its_own_and_ends_with_them(install, temporary, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    folder = mps_owner.own_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert mps_owner.start(folder) == ""
    assert (folder / "log" / "start").read_text().startswith("devices: None\n")
    assert len(mps_owner.processes(folder)) == 1
    mps_owner.stop(folder)
    assert mps_owner.processes(folder) == []
    assert list((temporary).iterdir()) == []


def test_a_daemon_that_does_not_quit_is_killed(install):
    install("deaf")
    folder = mps_owner.own_folder()
    mps_owner.start(folder)
    (pid,) = mps_owner.processes(folder)
    mps_owner.stop(folder)
    deadline = time.monotonic() + 5  # a signal takes its time on a busy machine
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)
    assert not folder.exists()


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def test_a_daemon_knows_nothing_of_one_that_the_environment_has(install, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    folder = mps_owner.own_folder()
    assert mps_owner.start(folder) == ""
    said = (folder / "log" / "start").read_text()
    assert "MPS: ['CUDA_MPS_LOG_DIRECTORY', 'CUDA_MPS_PIPE_DIRECTORY']" in said
    assert len(mps_owner.processes(folder)) == 1
    mps_owner.stop(folder)


def test_why_a_daemon_does_not_start_is_said(install):
    install("refuses")
    folder = mps_owner.own_folder()
    reason = "nvidia-cuda-mps-control ended with exit code 1: An instance of this daemon is already running"
    assert mps_owner.start(folder) == reason
    mps_owner.stop(folder)


@pytest.mark.parametrize(
    ("fault", "client", "who"),
    [("hangs", "pass", mps_owner.CONTROL), ("", "import time; time.sleep(60)", "a process under MPS")],
)
def test_a_daemon_or_a_client_that_hangs_is_not_waited_for(install, monkeypatch, fault, client, who):
    install(fault)
    monkeypatch.setattr(mps_owner, "START_S", 0.5)
    monkeypatch.setattr(mps_owner, "_TRY_A_CLIENT", client)
    folder = mps_owner.own_folder()
    reason = mps_owner.start(folder)
    mps_owner.stop(folder)
    assert reason.startswith(who)
    assert "did not end within 0.5 s" in reason
    assert daemons(folder.parent) == []


def test_the_error_of_a_client_is_told_as_cuda_numbers_it(install, monkeypatch, client):
    busy = "import ctypes; ctypes.CDLL = lambda name: type('', (), {'cuInit': lambda self, flags: 805})()\n"
    monkeypatch.setattr(mps_owner, "_TRY_A_CLIENT", busy + client)
    folder = mps_owner.own_folder()
    reason = mps_owner.start(folder)
    mps_owner.stop(folder)
    assert reason.endswith("CUDA error 805")


def test_what_a_killed_owner_left_is_swept_and_what_is_in_use_stays(install):
    left, used = mps_owner.own_folder(), mps_owner.own_folder()
    mps_owner.start(left)
    mps_owner.start(used)
    (survivor,) = mps_owner.processes(used)
    _let_go_of_lock(left)
    mps_owner.sweep()
    assert not left.exists()
    assert daemons(used.parent) == [survivor]
    mps_owner.stop(used)


def test_what_is_in_use_stays_also_when_old_files_are_cleaned_up(install):
    folder = mps_owner.own_folder()
    mps_owner.start(folder)
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    mps_owner.sweep()
    assert len(mps_owner.processes(folder)) == 1
    mps_owner.stop(folder)


def _let_go_of_lock(folder: Path) -> None:
    """Do as the kernel does when the process that holds it dies."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if folder.name in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.close(descriptor)
        except OSError:
            continue


def test_a_daemon_without_a_working_client_is_ended_and_the_reason_told(
    install, temporary, tmp_path, monkeypatch
):
    """The whole owner process."""
    monkeypatch.setattr(mps_owner, "__file__", str(_owner_that_tries("raise SystemExit(1)", tmp_path)))
    with pytest.raises(MpsUnavailable, match=r"a process under MPS cannot start CUDA"), mps_daemon():
        pass
    assert list((temporary).iterdir()) == []


def test_an_owner_that_dies_before_its_daemon_runs_is_told_of(install, tmp_path, monkeypatch):
    program = tmp_path / "owner.py"
    program.write_text("raise SystemExit(1)")
    monkeypatch.setattr(mps_owner, "__file__", str(program))
    with pytest.raises(MpsUnavailable, match="the owner of the MPS daemon died"), mps_daemon():
        pass


def test_the_owner_ends_its_daemon_when_the_launcher_is_killed(install, temporary, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(mps_owner.__file__).parents[1])!r})\n"
        "from spec_backend_cuda import mps, mps_owner\n"
        f"mps_owner.__file__ = {str(_owner_that_tries('pass', tmp_path))!r}\n"
        "with mps.mps_daemon() as daemon:\n"
        "    print(daemon.environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(launcher)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip()).parent
        assert len(mps_owner.processes(folder)) == 1
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    assert daemons(temporary) == []


def test_a_daemon_that_is_killed_is_told_of_and_the_run_fails_of_it(
    install, temporary, tmp_path, monkeypatch
):
    monkeypatch.setattr(mps_owner, "__file__", str(_owner_that_tries("pass", tmp_path)))
    backend = CudaBackend(CudaConfig(name="cuda"))
    with backend.prepare_host("colocated"):
        backend.check_host()
        (pid,) = daemons(temporary)
        time.sleep(3 * mps_owner.WATCH_S)  # the owner has seen it
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError, match=rf"^{mps_owner.CONTROL} \(pid {pid}\) died: .*MPS"):
            until_it_fails(backend)
    assert list((temporary).iterdir()) == []
    backend.check_host()


def test_an_owner_that_is_killed_ends_the_run_and_leaves_nothing(install, temporary, tmp_path, monkeypatch):
    monkeypatch.setattr(mps_owner, "__file__", str(_owner_that_tries("pass", tmp_path)))
    backend = CudaBackend(CudaConfig(name="cuda"))
    with backend.prepare_host("colocated"):
        (pid,) = daemons(temporary)
        backend.check_host()
        os.kill(_parent(pid), signal.SIGKILL)
        with pytest.raises(RunError, match=r"owner.* died: .*MPS"):
            until_it_fails(backend)
        assert daemons(temporary) == [pid]
    assert daemons(temporary) == []
    assert list((temporary).iterdir()) == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until_it_fails(backend: CudaBackend) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        backend.check_host()
        time.sleep(0.05)


def _owner_that_tries(client: str, tmp_path: Path) -> Path:
    """The owner's own file with another client to try MPS with: there may be no CUDA here."""
    source = Path(mps_owner.__file__).read_text()
    copy = tmp_path / "owner.py"
    copy.write_text(source.replace("\nif __name__", f"\n_TRY_A_CLIENT = {client!r}\nif __name__"))
    return copy


@pytest.mark.parametrize(("share", "percentage"), [(0.5, "50"), (1 / 3, "34"), (0.29, "29"), (0.001, "1")])
def test_shares_are_rounded_up_to_whole_percentages(share, percentage):
    assert thread_percentage({}, share) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage}


def test_a_cap_that_was_inherited_is_lifted():
    assert thread_percentage({}, 1.0) == {}
    inherited = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}
    assert thread_percentage(inherited, 1.0) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
