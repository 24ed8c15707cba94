"""Own a run's MPS daemon in a process of its own, ``python -I mps_owner.py``, without other packages.

The owner starts the daemon in new directories, writes one line of JSON with the result, and waits until its
standard input ends. If the daemon or one of its servers dies earlier, the owner writes a second line. The input
ends when the run closes it or dies. Then the owner ends the daemon with its servers and removes the directories. If
the owner is killed, the run cleans up. If both are killed, the owner of the next run cleans up: it removes
directories that are not locked, because the kernel releases the locks of dead processes. docs/decisions/013 says
why the Reaper of spec_processes is not enough.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "spec-mps-"
CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
START_S = 60.0
"""Maximum wait, in seconds, until the daemon has started and served a first client. Its server needs some
seconds for each GPU."""
ANSWER_S = 5.0
"""Maximum wait, in seconds, for the daemon's commands, which take milliseconds unless a killed client has
made a server hang."""
END_S = 3.0
WATCH_S = 0.25
"""Seconds between checks of the daemon's processes."""
_LONGEST_FOLDER = 107 - len(f"/{PREFIX}12345678/pipe/control_privileged")
"""Maximum length of the parent folder's path, in characters: a Unix socket's path has at most 107 characters,
from which the names below the parent are subtracted."""
_TRY_A_CLIENT = """
import ctypes, sys
code = ctypes.CDLL("libcuda.so.1").cuInit(0)
sys.exit(code and f"cuInit: CUDA error {code}")
"""


def mps_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a client of the daemon in ``folder``."""
    return {PIPE: str(folder / "pipe"), LOG: str(folder / "log")}


def folders() -> Path:
    """Return the parent of every run's folder.

    It is the temporary folder, or /tmp if the temporary folder's path is too long for sockets.
    """
    wanted = Path(tempfile.gettempdir())
    return wanted if len(str(wanted)) <= _LONGEST_FOLDER else Path("/tmp")


def own_folder() -> Path:
    """Return a new folder, which this process locks until it ends.

    The folder is locked before it gets its final name.
    """
    partial = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=folders()))
    lock(partial)
    folder = partial.with_name(partial.name[1:])
    partial.rename(folder)
    for part in ("pipe", "log"):
        (folder / part).mkdir()
    return folder


def lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock, or None if another process has the lock.

    Programs that clean up temporary folders do not delete a locked folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def start(folder: Path) -> str:
    """Start the daemon; return why it does not work, or an empty string if it works."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    client_env = inherited | mps_environment(folder)
    env = dict(client_env)
    if not all(entry.startswith("GPU-") for entry in env.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        env.pop("CUDA_VISIBLE_DEVICES", None)  # the daemon renumbers GPUs, and clients would do it again
    if reason := _failure([CONTROL, "-d"], env, folder / "log" / "start"):
        return f"{CONTROL} {reason}"
    if reason := _failure([sys.executable, "-I", "-c", _TRY_A_CLIENT], client_env, folder / "log" / "trial"):
        return f"a process under MPS cannot start CUDA: it {reason}"
    return ""


def _failure(command: Sequence[str], env: Mapping[str, str], output: Path) -> str:
    """Run a program; return how it failed, or an empty string."""
    with output.open("wb") as stream:  # a file: the daemon keeps its output open
        try:
            code = subprocess.call(
                command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, timeout=START_S
            )
        except OSError as error:
            return f"cannot be run: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"did not end within {START_S:g} s"
    last_words = output.read_text(errors="replace").strip().rpartition("\n")[2]
    return f"ended with exit code {code}: {last_words}" if code else ""


def stop(folder: Path) -> None:
    """End the daemon of a folder and its servers, and remove the folder."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [CONTROL],
            input=b"quit -t 1\n",
            env={**os.environ, **mps_environment(folder)},
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
        )
    deadline = time.monotonic() + END_S
    while (left := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def adopt() -> None:
    """Make this process the parent of orphaned daemons.

    A container's first process might not reap them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Reap children until none is left, but no longer than a killed child may need to end."""
    deadline = time.monotonic() + END_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def processes(folder: Path) -> list[int]:
    """Return the ids of a daemon and its servers.

    The daemon is the process that has the pipe directory in its environment. Its servers are its children and,
    after the daemon's end, children of this process.
    """
    mark = f"{PIPE}={folder / 'pipe'}".encode()
    parents = {
        int(entry.name): parent
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (parent := _parent_of_mps(entry)) is not None
    }
    marked = {pid for pid in parents if mark in _environment(pid)}
    return sorted(marked | {pid for pid, parent in parents.items() if parent in marked | {os.getpid()}})


def _parent_of_mps(process: Path) -> int | None:
    """Return the parent's id of a process that runs a program of MPS; None for all other processes."""
    try:
        if not (process / "comm").read_text().startswith(CONTROL[:15]):  # the kernel keeps 15 characters
            return None
        state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # the process has ended meanwhile
    return None if state == "Z" else int(parent)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # the process has ended meanwhile, or belongs to another user


def watch(folder: Path) -> None:
    """Wait for the end of standard input; if a daemon process dies earlier, write its name and id."""
    known: dict[int, str] = {}
    reported = False
    while not select.select([sys.stdin], [], [], WATCH_S)[0]:
        running = processes(folder)
        gone = known.keys() - running
        if gone and not reported:
            reported = True
            with suppress(BrokenPipeError):
                print(json.dumps({"ended": known[min(gone)]}), flush=True)
        known |= {pid: f"{_name(pid)} (pid {pid})" for pid in running if pid not in known}


def _name(pid: int) -> str:
    """Return the full name of a process's program."""
    with suppress(OSError):
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((Path(word).name for word in words if CONTROL[:15] in word), CONTROL)
    return CONTROL


def sweep() -> None:
    """End the daemons and remove the folders of runs whose owner was killed."""
    for folder in folders().glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or another sweep was faster
            if folder.stat().st_uid == os.geteuid() and (descriptor := lock(folder)) is not None:
                stop(folder)
                os.close(descriptor)


def forget_events(since_s: float) -> None:
    """Remove the files of shared events that ended processes have left since a time of the wall clock.

    The driver names such a file after the process that made it (hexadecimal), and does not delete it when the
    process ends.
    """
    deadline = time.monotonic() + END_S
    for file in Path("/dev/shm").glob("cuda.shm.*.*.*"):
        with suppress(OSError, ValueError):
            owner = int(file.name.split(".")[3], 16)
            status = file.stat()
            ours = status.st_uid == os.geteuid() and status.st_mtime >= since_s
            if ours and not runs(owner) and _is_let_go(file, deadline):
                file.unlink()


def _is_let_go(file: Path, deadline: float) -> bool:
    """Wait until no process has the file open; return False if the deadline passes first.

    The process id in the file's name is not reliable, because containers may share ``/dev/shm``.
    """
    while not _gets_lease(file):
        if time.monotonic() >= deadline:
            return False
        time.sleep(random.uniform(0.01, 0.05))  # random, so that processes retry at different times
    return True


def _gets_lease(file: Path) -> bool:
    """Return whether no other process has the file open.

    Only in this case the kernel grants a lease on the file, which is then released.
    """
    with file.open("r+b") as opened:
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)  # sent when another process opens it
        try:
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
    return True


def runs(pid: int) -> bool:
    """Return whether a process runs. A zombie, which a container may never reap, counts as ended."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    """Own a daemon until standard input ends."""
    started_s = time.time()
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager may signal every process of a run
        signal.signal(number, signal.SIG_IGN)
    adopt()
    sweep()
    folder = own_folder()
    try:
        reason = start(folder)
        print(json.dumps({"reason": reason} if reason else mps_environment(folder)), flush=True)
        if not reason:
            watch(folder)
        sys.stdin.read()
    finally:
        stop(folder)
        reap()
        forget_events(started_s)


if __name__ == "__main__":
    main()
