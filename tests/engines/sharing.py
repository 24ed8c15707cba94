"""Engines that share processes of vLLM or SGLang: a start takes seconds, and most tests only need one."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from spec_core.records import AcceptanceCounters
from spec_kit.hosting import EngineSubprocess, Mode, SpeculativeMode, SubprocessEngine

MOST_IDLE = 3
"""Programs that no engine uses and that stay: each takes more than a GiB, and three workers run tests."""


class Lease:
    """A running program for one engine: counts from where it was taken over, and runs on when it is closed."""

    def __init__(self, running: EngineSubprocess, give_back: Callable[[], None]) -> None:
        self._running = running
        self._closing = ExitStack()
        self._closing.callback(give_back)
        self._before = AcceptanceCounters()
        if isinstance(running.mode, SpeculativeMode):
            self._before = running.acceptance()

    def __getattr__(self, name: str):
        return getattr(self._running, name)

    def acceptance(self) -> AcceptanceCounters:
        return self._running.acceptance() - self._before

    def close(self) -> None:
        self._running.drain()
        self._closing.close()  # once


@dataclass
class Pool:
    """One program for each target and mode. A thread of its own starts them: each ends with the thread that did."""

    running: dict[object, EngineSubprocess] = field(default_factory=dict)
    """Least recently used first."""
    leased: Counter[object] = field(default_factory=Counter)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def lease(self, key: object, start: Callable[[], EngineSubprocess]) -> Lease:
        process = self.running.pop(key, None)
        if process is None:
            self.end_idle(MOST_IDLE - 1)
            process = self.thread.submit(start).result()
            process.wait_ready()
        self.running[key] = process
        self.leased[key] += 1
        return Lease(process, lambda: self.leased.subtract([key]))

    def end_idle(self, most: int) -> None:
        """End programs that no engine uses, until ``most`` are left."""
        idle = [key for key in self.running if self.leased[key] <= 0]
        for key in idle[: max(0, len(idle) - most)]:
            self.running.pop(key).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(EngineSubprocess.close, self.running.values()))
        self.thread.shutdown()


def sharing(engine: type[SubprocessEngine], pool: Pool) -> type[SubprocessEngine]:
    """Return the engine but for where its program comes from."""

    class Sharing(engine):
        def start_program(self, mode: Mode):
            key = (self.target.folder, self.config.model_dump_json(), mode)
            return pool.lease(key, lambda: engine.start_program(self, mode))

    return Sharing
