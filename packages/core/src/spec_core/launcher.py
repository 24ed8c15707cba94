"""Launcher: starts the processes of a run, carries messages between them and the run, and lets none outlive it.

A *worker* is one such process. What it is to be, its order says: ``entry`` names a function of three arguments, an
ExitStack that closes what it opens, a channel of messages to the run, and the order itself. A message has a ``kind``
and fields that JSON can hold; it never carries a tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.config import LauncherConfig
from spec_core.records import Availability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Worker(ABC):
    """One process of the run, as the run sees it."""

    name: str
    finished: bool
    """It may end now."""

    @abstractmethod
    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message. A worker that is gone hears nothing: its end is an event of its own."""


@dataclass(frozen=True)
class Event:
    """A message of a worker, or its end."""

    child: Worker
    record: dict[str, Any] | None
    """The message; None: the worker has ended."""


class Launcher(AbstractContextManager["Launcher"]):
    """Leaving it, by an exception or not, ends every worker and waits for it."""

    name: ClassVar[str]
    api_version: ClassVar[int]
    Config: ClassVar[type[LauncherConfig]] = LauncherConfig

    children: dict[str, Any]
    """Every worker that was started, by name."""

    @abstractmethod
    def __init__(self, logs: Path, peer_s: float, check_host: Callable[[], None]) -> None:
        """``logs``: folder for the workers' output; ``peer_s``: silence after which a worker counts as lost;
        ``check_host``: raises when something that the run needs on its host has died."""

    @classmethod
    def probe(cls) -> Availability:
        """Say whether this machine can run it, without starting anything."""
        return Availability(ok=True)

    @abstractmethod
    def spawn(self, name: str, order: Mapping[str, object], env: Mapping[str, str]) -> Worker:
        """Start a worker with ``env`` over this process's environment."""

    @abstractmethod
    def next_event(self, deadline_s: float = math.inf) -> Event | None:
        """Return the next message of any worker; None when woken, or at ``deadline_s`` (monotonic). Raise the run's
        failure: what a worker reports, a worker that ended early, or one that was silent for too long (PeerLost)."""

    @abstractmethod
    def wake(self) -> None:
        """Make ``next_event`` return None; safe in a signal handler."""

    @abstractmethod
    def wait_all(self, timeout_s: float) -> None:
        """Wait until the workers have ended by themselves. Raise DeadlineExceeded."""
