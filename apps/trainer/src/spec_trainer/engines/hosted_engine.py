"""HostedEngine: an engine whose program runs the target in processes of its own. Imports no torch.

What the program is (vLLM, SGLang) and how it is asked is said by a HostProcess; here is when it is started, for what,
and how calls follow each other.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar, cast

from spec_core.engine import Engine
from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters
from spec_trainer.engines.checks import check_length, check_schema, check_vocabulary
from spec_trainer.engines.modes import Capturing, Drafting, Plain
from spec_trainer.engines.running import Running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core.config import EngineConfig
    from spec_core.engine import Site
    from spec_core.records import CaptureRequest, FeatureSchema, Generation, SamplingParams
    from spec_core.target import TargetSpec
    from spec_core.transport import Transport
    from spec_trainer.engines.config import SendingConfig
    from spec_trainer.engines.host_process import HostProcess
    from spec_trainer.engines.modes import Mode

R = TypeVar("R")


class HostedEngine(Engine):
    """The program is started by the first call that needs it, for what that call needs (``modes.py``), and again when
    a call needs something else. One thread owns it; calls are taken in order. A capture batch is handed over whole
    and not waited for, so that the program goes from one to the next without a pause; a batch without requests only
    starts it."""

    in_process: ClassVar[bool] = False

    @classmethod
    def at(
        cls, config: EngineConfig, target: TargetSpec, site: Site, transport: Transport | None = None
    ) -> Self:
        """E7: this process touches no device, and needs no transport of its own."""
        return cls(config, target, site)

    def __init__(self, config: EngineConfig, target: TargetSpec, site: Site) -> None:
        self.config = config
        self.target = target
        self.transport = None
        self._site = site
        self._draft: tuple[Path, str] | None = None
        self._loads = 0
        self._counted = AcceptanceCounters()
        self._running: Running | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-engine")

    @abstractmethod
    def _process(self, mode: Mode, desk_address: str | None) -> HostProcess:
        """Starts the program for ``mode``; ``desk_address`` if that is capturing."""

    @abstractmethod
    def _limit(self, mode: Mode) -> tuple[int, str]:
        """Most tokens of a sample, or of a prompt with its answer, and what that comes of."""

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        done: Future[None] = Future()
        begun = self._submit(lambda: self._begin_capture(list(requests), schema, done))
        begun.add_done_callback(
            lambda begun: done.set_exception(begun.exception()) if begun.exception() else None
        )
        return done

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        return self._submit(lambda: self._generate(prompts, sampling)).result()

    def load_draft(self, folder: Path) -> None:
        """Restarts nothing: the program reads the folder when it is next asked to speculate."""
        from spec_trainer.engines.draft_folder import recognise

        draft = recognise(folder, self.target)
        self.check_draft(self.config, self.target, folder, num_draft_tokens=1)

        def use() -> None:
            self._draft, self._counted = (folder.resolve(), draft.name), AcceptanceCounters()
            self._loads += 1

        self._submit(use).result()

    def acceptance(self) -> AcceptanceCounters:
        return self._submit(self._acceptance).result()

    def health(self) -> None:
        self._check_open()
        running = self._running
        if running is not None:
            running.health()

    def close(self) -> None:
        """What runs ends with EngineError, a start too."""
        self._closing.set()
        if (running := self._running) is not None:
            running.close()
        self._thread.shutdown(wait=True)
        if (running := self._running) is not None:  # it was being constructed
            running.close()

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        def run() -> R:
            self._check_open()
            return work()

        self._check_open()
        return self._thread.submit(run)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineError(f"the {self.name} engine is closed")

    def _in_mode(self, mode: Mode) -> Running:
        """The program, started for ``mode``."""
        running = self._running
        if running is not None:
            running.health()  # a death is told once for all, not restarted away
            if running.mode == mode:
                return running
        if isinstance(mode, Drafting):
            self.check_draft(self.config, self.target, mode.folder, mode.num_draft_tokens)
        if running is not None:
            running.drain()
            self._counted = self._acceptance()
            self._running = None
            running.close()
        return self._start(mode)

    def _start(self, mode: Mode) -> Running:
        send_timeout_s = cast("SendingConfig", self.config).send_timeout_s
        self._running = running = Running(mode, self._site, send_timeout_s, partial(self._process, mode))
        try:
            self._check_open()  # whoever closed it may not have seen this one
            running.wait_ready()
        except BaseException:
            self._running = None
            running.close()
            raise
        return running

    def _begin_capture(
        self, requests: list[CaptureRequest], schema: FeatureSchema, done: Future[None]
    ) -> None:
        mode = Capturing(schema)
        if self._site.placement is None:
            raise EngineError("this engine was built without a placement: it can generate, not capture")
        check_schema(schema, self.target)
        longest, see = self._limit(mode)
        for request in requests:
            check_length(request.input_ids, longest, "a sample", see)
            check_vocabulary(request.input_ids, self.target, "a sample")
        running = self._in_mode(mode)
        if not requests:
            done.set_result(None)
            return

        def finish(captured: Future[None]) -> None:
            if (error := captured.exception()) is not None:
                done.set_exception(running.cause(error))
            else:
                done.set_result(None)

        running.capture(requests).add_done_callback(finish)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        mode = self._decoding_mode(sampling.num_draft_tokens)
        longest, see = self._limit(mode)
        for prompt in prompts:
            what = f"a prompt with {sampling.max_new_tokens} new tokens"
            check_length(prompt, longest - sampling.max_new_tokens, what, see)
            check_vocabulary(prompt, self.target, what)
        running = self._in_mode(mode)
        return running.generate(prompts, sampling) if prompts else []

    def _decoding_mode(self, num_draft_tokens: int) -> Mode:
        if num_draft_tokens == 0:
            return Plain()
        if self._draft is None:
            raise EngineError(f"{num_draft_tokens} draft tokens are wanted, but no draft is loaded")
        folder, algorithm = self._draft
        return Drafting(
            folder=folder, algorithm=algorithm, num_draft_tokens=num_draft_tokens, load=self._loads
        )

    def _acceptance(self) -> AcceptanceCounters:
        """Since the last load, over every process that has drafted since."""
        running = self._running
        if running is None or not isinstance(running.mode, Drafting) or running.mode.load != self._loads:
            return self._counted
        return _sum(self._counted, running.acceptance())


def _sum(one: AcceptanceCounters, other: AcceptanceCounters) -> AcceptanceCounters:
    longest = max(len(one.accepted_per_position), len(other.accepted_per_position))
    padded = [
        (*counters.accepted_per_position, *[0] * (longest - len(counters.accepted_per_position)))
        for counters in (one, other)
    ]
    return AcceptanceCounters(
        rounds=one.rounds + other.rounds,
        drafted=one.drafted + other.drafted,
        accepted=one.accepted + other.accepted,
        accepted_per_position=tuple(map(sum, zip(*padded, strict=True))),
    )
