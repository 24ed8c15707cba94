"""Run commands to their end: a failure ends the benchmark, and the benchmark's end ends the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LEAVING_S = 60.0
"""Time that a command has to end what it started, once it is asked to end."""
TAIL_LINES = 40


def end_by_exception() -> None:
    """Turn SIGTERM into SystemExit, so that the commands that this process runs are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def output_of(command: Sequence[str], log: Path, limit_s: float, logs: Path | None = None) -> str:
    """Run ``command`` and return its standard output; its stderr goes to ``log``.

    Raises SystemExit after a failure and prints the last lines of ``log`` and of each file under ``logs``.
    """
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise _failed(command, f"was not done within {limit_s:.0f} s", _files(log, logs)) from None
    finally:
        _end(process)
    if process.returncode:
        raise _failed(command, f"ended with exit code {process.returncode}", _files(log, logs))
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM, so that the command ends its own processes; then kill its process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=LEAVING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _files(log: Path, logs: Path | None) -> Iterator[Path]:
    if logs is not None and logs.is_dir():
        yield from sorted(logs.glob("*.log"))
    yield log


def _failed(command: Sequence[str], what: str, files: Iterator[Path]) -> SystemExit:
    for file in files:
        lines = file.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print(f"==> {file}", *lines, sep="\n", file=sys.stderr)
    return SystemExit(f"{' '.join(command)}\n{what}")
