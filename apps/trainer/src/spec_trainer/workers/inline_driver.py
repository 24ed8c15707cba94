"""InlineDriver runs a training run in this process, which has the engine and the only trainer rank."""

from __future__ import annotations

import gc
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_trainer.base.waiting import Waiting
from spec_trainer.run.dispatch import Dispatcher, capture_from
from spec_trainer.run.timer import Timer
from spec_trainer.training.wiring import RankLinks, create_engine, rank_features, start_engine, train_rank
from spec_trainer.workers.decoder import EngineDecoder, interrupted_decoding, portions
from spec_trainer.workers.passes import Pass
from spec_trainer.workers.run_driver import RunDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from spec_core import Engine, Transport
    from spec_trainer.base.progress import StepProgress
    from spec_trainer.base.stop_request import StopRequest
    from spec_trainer.push.live_measurements import Measure
    from spec_trainer.run.dispatch import CapturerSource
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.training.wiring import Consume, RankFeatures
    from spec_trainer.workers.run_driver import MeasureDraft, Pause, RankTask

    OpenSource = Callable[[Transport], CapturerSource]
    """Opens a source of features that sends over a transport."""


@contextmanager
def inline_driver(
    spec: RunSpec,
    stop: StopRequest,
    progress: StepProgress,
    consume: Consume = train_rank,
    device: torch.device | None = None,
    open_source: OpenSource | None = None,
) -> Iterator[InlineDriver]:
    """Yield the driver of a run in this process; its engine, if the run has one, is ready to capture.

    ``consume`` is called to process the features, by default to train on them. ``device``: by default the backend's
    first device. ``open_source`` returns the source of features that replaces the engine.
    """
    with ExitStack() as stack:
        stack.enter_context(spec.backend.prepare_host("inline"))
        device = device or spec.backend.device(0)
        transport = spec.backend.transport("inline")
        engines: list[Engine] = []
        sources = [] if open_source is None else [stack.enter_context(open_source(transport))]
        if spec.config.data.features is None and not sources:
            around = {"placement": "inline", "transport": transport}
            engines = [stack.enter_context(create_engine(spec, spec.target, **around))]
            with Waiting(f"starting captures of engine {spec.config.engine.name}"):
                start_engine(engines[0], spec.target, spec.schema)
        yield InlineDriver(
            device=device,
            engines=engines,
            sources=sources,
            features=stack.enter_context(rank_features(spec, 0, device, transport=transport)),
            decoders=[stack.enter_context(EngineDecoder(spec, engine)) for engine in engines],
            progress=stack.enter_context(progress),
            stop=stop,
            consume=consume,
            timer=Timer() if spec.config.decode.every else None,
        )


@dataclass(frozen=True, kw_only=True)
class InlineDriver(RunDriver):
    """Captures features, trains and decodes one after the other, in the calling thread."""

    device: torch.device
    engines: Sequence[Engine]
    """The run's engine; empty if features come from a folder or a source."""
    sources: Sequence[CapturerSource] = ()
    """The source that replaces the engine, if there is one."""
    decoders: Sequence[EngineDecoder]
    """The EngineDecoder of each engine."""
    features: RankFeatures
    consume: Consume
    progress: StepProgress
    stop: StopRequest
    timer: Timer | None
    """Timer that all cycles of a run that decodes share; None otherwise."""

    def train(
        self, part: RunSpec, notes: Mapping[str, Any] | None = None, measure: MeasureDraft | None = None
    ) -> float:
        """Train the remaining steps of ``part``, the run or one cycle.

        Return the seconds that the engine spent on captures. ``measure`` is called between steps.
        """
        at_once = measure and _at_once(measure)
        return self._consume(self.consume, part, notes, self._should_stop, measure=at_once)

    def perform(
        self,
        task: RankTask,
        part: RunSpec,
        notes: Mapping[str, Any] | None = None,
        pause: Pause | None = None,
    ) -> dict[str, Any]:
        """Run ``task`` on the samples of the RunSpec ``part``, and return the task's result."""
        result: dict[str, Any] = {}

        def should_stop(done_steps: int) -> bool:
            if pause is not None:
                pause(lambda: self.stop.requested, self.wait)
            return self.stop.requested

        self._consume(task.consume, part, notes, should_stop, result=result)
        return result

    def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``."""
        time.sleep(seconds)

    def _should_stop(self, done_steps: int) -> bool:
        return self.stop.requested

    def _consume(
        self,
        consume: Consume,
        part: RunSpec,
        notes: Mapping[str, Any] | None,
        should_stop: Callable[[int], bool],
        **links: Any,
    ) -> float:
        """Call ``consume`` with the features of ``part``, and return the seconds of the engine's captures."""
        import torch.distributed as dist

        engines = [
            *(partial(capture_from, part.dataset, engine, part.schema) for engine in self.engines),
            *(source.capturer(part) for source in self.sources),
        ]
        dispatcher = Dispatcher(
            part.schedule, part.schema, engines, [self.features.address], part.window_bytes
        )
        stream = self.features.stream(part, dispatcher.released)

        def work(done_steps: int, train: Callable[[], object]) -> None:
            dispatcher.start(part.schedule.items(done_steps), failed=stream.fail)
            train()

        try:
            consume(
                part,
                0,
                self.device,
                RankLinks(
                    store=dist.HashStore(),
                    stream=stream,
                    work=work,
                    should_stop=should_stop,
                    show=self.progress.show,
                    notes=lambda: {**notes, "prefill_s": dispatcher.busy_s} if notes else {},
                    timer=self.timer,
                    **links,
                ),
            )
        finally:
            dispatcher.stop()
        gc.collect()  # modules refer to themselves, and hold their memory and the sockets of their process group
        return dispatcher.busy_s

    def serve(self, version: int, folder: Path) -> None:
        """Let the engine serve the draft in ``folder`` as ``version``. Raise RunError if it cannot be pushed."""
        self.decoders[0].serve(version, folder)

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts, portion by portion; raise Interrupted between portions if a stop is requested."""
        answered: list[Pass] = []
        for portion in portions(prompts, seed):
            if self.stop.requested:
                raise interrupted_decoding()
            answered.append(self.decoders[0].generate(portion))
        return Pass.of(answered)


def _at_once(measure: MeasureDraft) -> Measure:
    """Return a function that calls ``measure``, waits for the figures, and returns a finished future."""

    def measured(version: int, folder: Path) -> Future[dict[str, Any]]:
        done: Future[dict[str, Any]] = Future()
        done.set_result(measure(version, folder))
        return done

    return measured
