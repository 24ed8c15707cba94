"""Launchers with toy workers, and waits that end: what the tests of a launcher are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from spec_core import Backend, LaunchContext, Launcher, WorkerEnded, WorkerMessage, WorkerSpec
from spec_testing.limits import patient
from spec_testing.reference import reference_backend

PATIENCE_S = patient(30.0)
"""Longest wait, in seconds, for anything that a launcher must do."""
PEER_S = 2.0
"""``LaunchContext.peer_s`` of every launcher of the suite."""


def construct(
    launcher_type: type[Launcher], logs: Path, backend: Backend | None = None, **options: object
) -> Launcher:
    """Return a new launcher for a test. ``options``: fields of the launcher's configuration."""
    context = LaunchContext(backend=backend or reference_backend(), logs=logs, peer_s=PEER_S)
    return launcher_type(launcher_type.Config(name=launcher_type.name, **options), context)


def toy(entry: str, name: str = "toy-0", **arguments: Any) -> WorkerSpec:
    """Return a WorkerSpec. ``entry``: name of a function in ``toy_workers``."""
    return WorkerSpec(
        name=name, entry=f"spec_testing.toy_workers:{entry}", arguments=arguments, role="engine"
    )


def received(launcher: Launcher) -> WorkerMessage | WorkerEnded:
    """Return the launcher's next event; fail after PATIENCE_S seconds."""
    event = launcher.receive(time.monotonic() + PATIENCE_S)
    assert event is not None, f"nothing was received within {PATIENCE_S} s"
    return event


def message(launcher: Launcher) -> dict[str, Any]:
    """Return the next message of a worker; fail if the next event is the end of a worker."""
    event = received(launcher)
    assert isinstance(event, WorkerMessage), event
    return event.message


def none_is_running(pids: Sequence[int]) -> bool:
    """Return whether all of these processes have ended."""
    return not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    """Return whether the process ``pid`` runs; a zombie does not run."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def assert_soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not so within {PATIENCE_S} s"
        time.sleep(0.02)


@contextmanager
def limit() -> Generator[None]:
    """Fail a block that takes longer than PATIENCE_S."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < PATIENCE_S, f"took longer than {PATIENCE_S} s"
