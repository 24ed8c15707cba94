"""SubprocessEngine: an engine whose program runs the target in processes of its own. Imports no torch.

An EngineSubprocess says what the program is and how it is asked. This module decides when the program is started and
for what, and puts calls in order.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from spec_core.engine import Engine
from spec_core.errors import ArtifactError, EngineError
from spec_core.hosting.checks import check_length, check_schema, check_vocabulary
from spec_core.hosting.modes import CaptureMode, PlainMode, SpeculativeMode
from spec_core.hosting.running import EngineSession
from spec_core.records import AcceptanceCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core.config import EngineConfig
    from spec_core.draft import Draft
    from spec_core.engine import EngineContext
    from spec_core.hosting.config import SendingConfig
    from spec_core.hosting.host_process import EngineSubprocess
    from spec_core.hosting.modes import Mode
    from spec_core.records import CaptureRequest, FeatureSchema, Generation, SamplingParams
    from spec_core.target import TargetSpec

R = TypeVar("R")


class SubprocessEngine(Engine):
    """Starts its program at the first call that needs it, in the mode that the call needs (``modes.py``), and anew
    when a call needs another mode.

    One thread owns the program, and takes calls in order. A capture batch is handed over whole and not waited for, so
    that the program goes from one batch to the next without a pause. The engine's own process touches no device.
    """

    in_process: ClassVar[bool] = False

    def __init__(self, config: EngineConfig, target: TargetSpec, context: EngineContext) -> None:
        super().__init__(config, target, context)
        self._draft: tuple[Draft, Path] | None = None
        self._loads = 0
        self._counted = AcceptanceCounters()
        self._session: EngineSession | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-engine")

    @abstractmethod
    def _process(self, mode: Mode, desk_address: str | None) -> EngineSubprocess:
        """Start the program for ``mode``; ``desk_address`` is set when that is a CaptureMode."""

    @abstractmethod
    def _limit(self, mode: Mode) -> tuple[int, str]:
        """Return the most tokens of a sample, or of a prompt with its answer, and the setting that limits them."""

    @classmethod
    def serving_method(cls, config: EngineConfig, draft: Draft, folder: Path) -> str:
        """Return the program's own name for how ``draft`` proposes. Raise ArtifactError where none is known."""
        if (method := draft.serving_methods.get(cls.name)) is None:
            raise ArtifactError(
                f"draft {folder} cannot be served by engine {cls.name!r}: plugin {draft.name!r} names no method of "
                f"this engine; its serving_methods name {', '.join(sorted(draft.serving_methods)) or 'no engine'}"
            )
        return method

    def start(self, schema: FeatureSchema) -> None:
        self._submit(lambda: self._capture_session(schema)).result()

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
        """Check the folder; the program reads it when it is next asked to speculate."""
        from spec_core.drafting.draft_folder import recognise

        draft = recognise(folder, self.target)
        self.check_draft(self.config, self.target, draft, folder, num_draft_tokens=1)

        def use() -> None:
            self._draft, self._counted = (draft, folder.resolve()), AcceptanceCounters()
            self._loads += 1

        self._submit(use).result()

    def acceptance(self) -> AcceptanceCounters:
        return self._submit(self._acceptance).result()

    def health(self) -> None:
        self._check_open()
        session = self._session
        if session is not None:
            session.health()

    def close(self) -> None:
        """Stop the program; a call that is being served, a start included, ends with EngineError."""
        self._closing.set()
        if (session := self._session) is not None:
            session.close()
        self._thread.shutdown(wait=True)
        if (session := self._session) is not None:  # it was being constructed
            session.close()

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        def run() -> R:
            self._check_open()
            return work()

        self._check_open()
        return self._thread.submit(run)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineError(f"the {self.name} engine is closed")

    def _session_for(self, mode: Mode) -> EngineSession:
        """Return the program, started in ``mode``."""
        session = self._session
        if session is not None:
            session.health()  # a death is told once for all, not restarted away
            if session.mode == mode:
                return session
        if self._draft is not None and isinstance(mode, SpeculativeMode):
            self.check_draft(self.config, self.target, *self._draft, mode.num_draft_tokens)
        if session is not None:
            session.drain()
            self._counted = self._acceptance()
            self._session = None
            session.close()
        return self._start(mode)

    def _start(self, mode: Mode) -> EngineSession:
        send_timeout_s = cast("SendingConfig", self.config).send_timeout_s
        self._session = session = EngineSession(
            mode, self.context, send_timeout_s, partial(self._process, mode)
        )
        try:
            self._check_open()  # whoever closed it may not have seen this one
            session.wait_ready()
        except BaseException:
            self._session = None
            session.close()
            raise
        return session

    def _capture_session(self, schema: FeatureSchema) -> EngineSession:
        if self.context.placement is None:
            raise EngineError("this engine was built without a placement: it can generate, not capture")
        check_schema(schema, self.target)
        return self._session_for(CaptureMode(schema))

    def _begin_capture(
        self, requests: list[CaptureRequest], schema: FeatureSchema, done: Future[None]
    ) -> None:
        longest, see = self._limit(CaptureMode(schema))
        for request in requests:
            check_length(request.input_ids, longest, "a sample", see)
            check_vocabulary(request.input_ids, self.target, "a sample")
        session = self._capture_session(schema)
        if not requests:
            done.set_result(None)
            return

        def finish(captured: Future[None]) -> None:
            if (error := captured.exception()) is not None:
                done.set_exception(session.cause(error))
            else:
                done.set_result(None)

        session.capture(requests).add_done_callback(finish)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        mode = self._decoding_mode(sampling.num_draft_tokens)
        longest, see = self._limit(mode)
        for prompt in prompts:
            what = f"a prompt with {sampling.max_new_tokens} new tokens"
            check_length(prompt, longest - sampling.max_new_tokens, what, see)
            check_vocabulary(prompt, self.target, what)
        session = self._session_for(mode)
        return session.generate(prompts, sampling) if prompts else []

    def _decoding_mode(self, num_draft_tokens: int) -> Mode:
        if num_draft_tokens == 0:
            return PlainMode()
        if self._draft is None:
            raise EngineError(f"{num_draft_tokens} draft tokens are wanted, but no draft is loaded")
        draft, folder = self._draft
        method = self.serving_method(self.config, draft, folder)
        return SpeculativeMode(
            folder=folder, method=method, num_draft_tokens=num_draft_tokens, load=self._loads
        )

    def _acceptance(self) -> AcceptanceCounters:
        """Return what every session since the last load has counted."""
        session = self._session
        if (
            session is None
            or not isinstance(session.mode, SpeculativeMode)
            or session.mode.load != self._loads
        ):
            return self._counted
        return _sum(self._counted, session.acceptance())


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
