"""The process that owns a run's MPS daemon: ``python -I mps_guard.py``, only the standard library.

It starts the daemon in directories of its own, says on one line of JSON how that went, and waits for its standard
input to end; on a second line it tells if the daemon or a server of it dies before. The input ends when the launcher
closes it, or dies of whatever: one way out for both. Then the daemon and its servers end and the directories go. If
this process is killed, the launcher cleans up; if both are, the next run's guard does: a directory in use is locked,
and the kernel lets go of locks.
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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "spec-mps-"
CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
START_S = 60.0
"""For the daemon to start, and for a process to get through it; its server takes seconds per GPU."""
ANSWER_S = 5.0
"""For the daemon's own commands; they take milliseconds, but for a server that a killed client has made hang."""
END_S = 3.0
WATCH_S = 0.25
"""Between looks at the daemon's processes."""
_LONGEST_FOLDER = 107 - len(f"/{PREFIX}12345678/pipe/control_privileged")
"""What the name of a Unix socket holds, less ours and the longest of the daemon's."""
_TRY_A_CLIENT = """
import ctypes, sys
code = ctypes.CDLL("libcuda.so.1").cuInit(0)
sys.exit(code and f"cuInit: CUDA error {code}")
"""


def environment(folder: Path) -> dict[str, str]:
    return {PIPE: str(folder / "pipe"), LOG: str(folder / "log")}


def folders() -> Path:
    """Where every run's folder is: the system's temporary folder, unless its name is too long for a socket."""
    wanted = Path(tempfile.gettempdir())
    return wanted if len(str(wanted)) <= _LONGEST_FOLDER else Path("/tmp")


def own_folder() -> Path:
    """A new folder, locked for as long as this process lives before others can see it as a run's."""
    partial = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=folders()))
    lock(partial)
    folder = partial.with_name(partial.name[1:])
    partial.rename(folder)
    for part in ("pipe", "log"):
        (folder / part).mkdir()
    return folder


def lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None if another process has it. What cleans temporary folders up
    leaves a locked one alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def start(folder: Path) -> str:
    """Starts the daemon; says why it does not work, or nothing."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    client_env = inherited | environment(folder)
    env = dict(client_env)
    if not all(entry.startswith("GPU-") for entry in env.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        env.pop("CUDA_VISIBLE_DEVICES", None)  # a daemon renumbers what it sees, and clients would count anew
    if reason := _failure([CONTROL, "-d"], env, folder / "log" / "start"):
        return f"{CONTROL} {reason}"
    if reason := _failure([sys.executable, "-I", "-c", _TRY_A_CLIENT], client_env, folder / "log" / "trial"):
        return f"a process under MPS cannot start CUDA: it {reason}"
    return ""


def _failure(command: Sequence[str], env: Mapping[str, str], said: Path) -> str:
    """Runs a program; says how it failed, or nothing."""
    with said.open("wb") as output:  # a file: the daemon keeps its output open
        try:
            code = subprocess.call(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=START_S
            )
        except OSError as error:
            return f"cannot be run: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"did not end within {START_S:g} s"
    last_words = said.read_text(errors="replace").strip().rpartition("\n")[2]
    return f"ended with exit code {code}: {last_words}" if code else ""


def stop(folder: Path) -> None:
    """Ends the daemon of a folder and whatever it started, and removes the folder."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [CONTROL],
            input=b"quit -t 1\n",
            env={**os.environ, **environment(folder)},
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
    """Daemons become children of this process, not of the first one, which in a container may reap nobody."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Takes leave of the children that have ended, for as long as it takes a killed one to do so."""
    deadline = time.monotonic() + END_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def processes(folder: Path) -> list[int]:
    """The daemon, known by the pipe directory in its environment, and its servers, which are its children, or this
    process's when it has died."""
    mark = f"{PIPE}={folder / 'pipe'}".encode()
    parents = {
        int(entry.name): parent
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (parent := _parent_of_mps(entry)) is not None
    }
    marked = {pid for pid in parents if mark in _environment(pid)}
    return sorted(marked | {pid for pid, parent in parents.items() if parent in marked | {os.getpid()}})


def _parent_of_mps(process: Path) -> int | None:
    """Id of the parent of a process that runs a program of MPS; None of all others, and of dead ones."""
    try:
        if not (process / "comm").read_text().startswith(CONTROL[:15]):  # the kernel keeps 15 characters
            return None
        state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # it ended meanwhile
    return None if state == "Z" else int(parent)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it ended meanwhile, or is another user's


def watch(folder: Path) -> None:
    """Until standard input ends. Tells of the first process of the daemon that has died."""
    known: dict[int, str] = {}
    told = False
    while not select.select([sys.stdin], [], [], WATCH_S)[0]:
        running = processes(folder)
        gone = known.keys() - running
        if gone and not told:
            told = True
            with suppress(BrokenPipeError):
                print(json.dumps({"ended": known[min(gone)]}), flush=True)
        known |= {pid: f"{_name(pid)} (pid {pid})" for pid in running if pid not in known}


def _name(pid: int) -> str:
    """The program's in full."""
    with suppress(OSError):
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((Path(word).name for word in words if CONTROL[:15] in word), CONTROL)
    return CONTROL


def sweep() -> None:
    """Ends and removes what runs have left whose guard was killed."""
    for folder in folders().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another sweep was faster
            if folder.stat().st_uid == os.geteuid() and (descriptor := lock(folder)) is not None:
                stop(folder)
                os.close(descriptor)


def forget_events(since_s: float) -> None:
    """Removes what ended processes have left of the events that they shared, from that wall-clock second on: the
    driver keeps them in files named after their owner's process (hexadecimal), and forgets them at its end."""
    deadline = time.monotonic() + END_S
    for file in Path("/dev/shm").glob("cuda.shm.*.*.*"):
        with suppress(OSError, ValueError):
            owner, status = int(file.name.split(".")[3], 16), file.stat()
            ours = status.st_uid == os.geteuid() and status.st_mtime >= since_s
            if ours and not runs(owner) and _is_let_go(file, deadline):
                file.unlink()


def _is_let_go(file: Path, deadline: float) -> bool:
    """Whether nobody has it open, at the deadline at last. The owner's number says little where containers share
    ``/dev/shm`` and count their processes apart."""
    while not _gets_lease(file):
        if time.monotonic() >= deadline:
            return False
        time.sleep(random.uniform(0.01, 0.05))  # out of step with others who ask
    return True


def _gets_lease(file: Path) -> bool:
    """The kernel gives none on a file that anybody else has open: so this lets it go at once, for others who ask."""
    with file.open("r+b") as opened:
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)  # of whoever opens it now; harmless
        try:
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
    return True


def runs(pid: int) -> bool:
    """Not so of a zombie: in a container nobody may take leave of an orphan."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    started_s = time.time()
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager may signal every process of a run
        signal.signal(number, signal.SIG_IGN)
    adopt()
    sweep()
    folder = own_folder()
    try:
        reason = start(folder)
        print(json.dumps({"reason": reason} if reason else environment(folder)), flush=True)
        if not reason:
            watch(folder)
        sys.stdin.read()
    finally:
        stop(folder)
        reap()
        forget_events(started_s)


if __name__ == "__main__":
    main()
