"""RunDecoder: the engine of a run as it decodes, and the way of fresh weights into it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import RunError
from spec_core.records import SamplingParams
from spec_core.resource import Resource
from spec_trainer.push.servers import open_transports
from spec_trainer.stop_request import Interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spec_core import Engine
    from spec_core.records import AcceptanceCounters, Generation
    from spec_core.weight_sync import Publisher
    from spec_trainer.run_spec import RunSpec
    from spec_trainer.stop_request import StopRequest

log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Prompts that the engine gets at a time: between them the run may be interrupted. Answers depend on it."""
_NAME = "engine"


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Answers to some prompts, what the engine has counted, and its time."""

    answers: list[Generation]
    counters: AcceptanceCounters
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)


class RunDecoder(Resource):
    """Decodes with the draft that it serves. The first one is loaded; later ones are pushed while it serves."""

    def __init__(self, spec: RunSpec, engine: Engine, stop: StopRequest) -> None:
        """Decode by ``engine``; nothing is served yet."""
        self._spec, self._engine, self._stop = spec, engine, stop
        self._version: int | None = None
        self._publisher: Publisher | None = None

    def serve(self, version: int, folder: Path) -> None:
        """Serve the draft in ``folder``. Raise RunError where it cannot be pushed."""
        if self._version is None:
            self._engine.load_draft(folder)
        elif version != self._version:
            self._push(version, folder)
        self._version = version

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Decoded:
        """Answer prompts as section ``decode`` says; raise Interrupted between two portions of them."""
        decode = self._spec.config.decode
        before, started = self._engine.acceptance(), time.monotonic()
        answers: list[Generation] = []
        for start in range(0, len(prompts), _AT_ONCE):
            if self._stop.requested:
                raise Interrupted("interrupted while prompts were answered; the same command continues there")
            sampling = SamplingParams(
                max_new_tokens=decode.max_new_tokens,
                temperature=decode.temperature,
                top_p=decode.top_p,
                seed=seed + start,
                num_draft_tokens=self._spec.num_draft_tokens,
                with_margins=False,
            )
            answers += self._engine.generate(prompts[start : start + _AT_ONCE], sampling)
        counters = self._engine.acceptance() - before
        return Decoded(answers=answers, counters=counters, seconds=time.monotonic() - started)

    def close(self) -> None:
        """End the connection by which weights are pushed; the engine stays."""
        if self._publisher is not None:
            self._publisher.close()

    def _push(self, version: int, folder: Path) -> None:
        from safetensors.torch import load_file

        config = self._spec.config.push
        publisher = self._publisher = self._publisher or self._new_publisher()
        weights = load_file(folder / "model.safetensors")
        report = publisher.publish(version, weights, timeout_s=config.timeout_s).result()
        outcome = report.replicas[_NAME]
        if not report.committed:
            raise RunError(
                f"the run's engine did not take draft version {version}: {outcome.state}: {outcome.reason}"
            )
        log.info("draft version %d was pushed in %.2f s", version, report.seconds["total"])

    def _new_publisher(self) -> Publisher:
        from spec_core.weight_sync import Publisher

        spec, push = self._spec, self._spec.config.push
        transports = open_transports(spec.backend, push)
        device = spec.backend.device(0)
        publisher = Publisher(
            transports,
            spec.target.digest,
            device=device,
            address=push.address,
            fastest_first=not push.transport,
        )
        publisher.add(_NAME, self._engine.draft_replica()).result()
        return publisher
