"""A vLLM process with all that belongs to it: the desk of a capturing one, and what it still has to send."""

from __future__ import annotations

import os
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters
from spec_core.resource import Resource
from spec_trainer.engines.capture_desk import CaptureDesk
from spec_trainer.engines.vllm.modes import (
    DEFAULT_ENVIRONMENT,
    Capturing,
    engine_arguments,
    forced_environment,
)
from spec_trainer.engines.vllm.process import VllmProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_core.engine import Site
    from spec_core.records import CaptureRequest
    from spec_core.target import TargetSpec
    from spec_trainer.engines.vllm.config import VllmConfig
    from spec_trainer.engines.vllm.modes import Mode
    from spec_trainer.launch.control import Record


class RunningVllm(Resource):
    """Started for one mode, until closed."""

    def __init__(self, config: VllmConfig, target: TargetSpec, site: Site, mode: Mode) -> None:
        self.mode = mode
        self._config = config
        self._site = site
        self._open: set[Future[None]] = set()
        self._desk: CaptureDesk | None = None
        if isinstance(mode, Capturing):
            self._desk = CaptureDesk(site, mode.schema, config.send_timeout_s)
        forced = forced_environment(mode, self._desk.address if self._desk else None)
        environment = {**DEFAULT_ENVIRONMENT, **os.environ, **forced}
        arguments = engine_arguments(config, target, site, mode)
        self._process = VllmProcess(arguments, environment, site.peer_s)

    def wait_ready(self) -> None:
        self._process.wait_ready(self._site.start_s)

    def capture(self, requests: Sequence[CaptureRequest]) -> list[Future[None]]:
        """One future per request, done when its features were handed to their transport."""
        assert self._desk is not None
        sent: list[Future[None]] = []
        for (key, done), request in zip(self._desk.expect(requests), requests, strict=True):
            sampling = {
                "max_tokens": 1,
                "temperature": 0.0,
                "extra_args": {"kv_transfer_params": {"capture_key": key}},
            }
            ran = self._process.run(request.input_ids, sampling)
            ran.add_done_callback(lambda ran, key=key: self._ran(key, ran))
            self._open.add(done)
            done.add_done_callback(self._open.discard)
            sent.append(done)
        return sent

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Mapping[str, Any]]
    ) -> list[Record]:
        running = [
            self._process.run(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        return [answer.result() for answer in running]

    def acceptance(self) -> AcceptanceCounters:
        """Since it was started."""
        counted = self._process.counters()
        return AcceptanceCounters(
            rounds=counted["rounds"],
            drafted=counted["drafted"],
            accepted=counted["accepted"],
            accepted_per_position=tuple(counted["accepted_per_position"]),
        )

    def cause(self, error: BaseException) -> BaseException:
        """The death of vLLM's process where that is what ``error`` comes of."""
        try:
            self.health()
        except EngineError as failure:
            return self._process.death() or failure
        return error

    def health(self) -> None:
        self._process.health()
        if self._desk is not None:
            self._desk.health()

    def drain(self) -> None:
        """Until nothing that was asked for is still to come."""
        wait(list(self._open))

    def close(self) -> None:
        self._process.close()
        if self._desk is not None:
            self._desk.close()

    def _ran(self, key: int, ran: Future[Record]) -> None:
        """vLLM is through with a request. Its states are the worker's to send, and the desk hears of that."""
        error = ran.exception()
        if error is not None and self._desk is not None:
            self._desk.fail(key, error)
