"""A third party's plugins: an engine with moods, a strategy that forbids torch's default group, a backend whose
memory is limited and known."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineConfig, Placement
from spec_core.errors import RunError
from spec_core.records import Capabilities, CaptureRequest, FeatureSchema
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_strategy_fsdp.strategy import FsdpStrategy

log = logging.getLogger(__name__)


class MoodyConfig(HfConfig):
    slow_one: Path | None = None
    """The replica that creates this file first takes ten times as long as it would."""
    other_layers_at: int | None = None
    """Number of the capture of other layers than the trainer expects."""
    has_child: bool = False
    """Starts a process of its own, as engines with workers do."""


class MoodyEngine(HfEngine):
    name: ClassVar[str] = "moody"
    Config: ClassVar = MoodyConfig

    def __init__(self, config: EngineConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self._slow = False
        self._captures = 0
        if config.slow_one is not None:
            try:
                config.slow_one.touch(exist_ok=False)
                self._slow = True
            except FileExistsError:
                pass
        if config.has_child:
            subprocess.Popen(["sleep", "600"])

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        self._captures += 1
        if self._captures == self.config.other_layers_at:
            schema = replace(schema, layers=schema.layers[:-1])
        if not self._slow:
            return super().capture(requests, schema)
        start = time.monotonic()
        done = super().capture(requests, schema)
        done.exception()
        time.sleep(9 * (time.monotonic() - start))
        return done


class LimitedBackend(CpuBackend):
    """Processors whose memory can be shared out as a device's; it is not really limited. They need a daemon."""

    name: ClassVar[str] = "limited"
    _daemon: subprocess.Popen[bytes] | None = None

    @contextmanager
    def prepare_host(self, placement: Placement) -> Iterator[None]:
        with subprocess.Popen(["sleep", "600"]) as self._daemon:
            try:
                yield
            finally:
                self._daemon.kill()

    def check_host(self) -> None:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise RunError(f"the daemon (pid {self._daemon.pid}) died")

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(
            super().capabilities(),
            memory_limit=True,
            device_ipc=True,
            device_bytes=1 << 30,
            process_bytes=1 << 26,
        )

    def limit_memory(self, fraction: float) -> None:
        log.info("limited to %.3f", fraction)


class GuardedStrategy(FsdpStrategy):
    """From ``attach`` on, c10d's way from "no group" to the default group is closed."""

    name: ClassVar[str] = "guarded"

    def attach(self, *args: Any) -> None:
        super().attach(*args)
        _forbid_default_group()

    def close(self) -> None:
        super().close()
        log.info("the strategy is closed")


_QUERIES = {"get_rank", "_get_group_size", "get_backend"}
"""They tell a rank who it is, and speak to nobody."""


def _forbid_default_group() -> None:
    import torch
    from torch.distributed import distributed_c10d as c10d

    getter = c10d._get_default_group

    def forbidden() -> Any:
        caller = sys._getframe(1)
        if caller.f_locals.get("group") is None and caller.f_code.co_name not in _QUERIES:
            raise AssertionError(f"{caller.f_code.co_name} without a group")
        return getter()

    c10d._get_default_group = forbidden
    for collective in (c10d.barrier, lambda: c10d.all_reduce(torch.zeros(1))):
        try:
            collective()
        except AssertionError as error:
            log.info("forbidden: %s", error)
