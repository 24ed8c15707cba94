"""SubprocessEngine is an engine whose program runs the target in separate processes.

A subclass of EngineSubprocess defines the program and how requests reach it. This module decides when the program
is started and in which mode, and executes calls one after the other. It imports no torch.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from spec_core import Engine, FrozenProducts
from spec_core.errors import ArtifactError, ConfigError, EngineError
from spec_core.records import AcceptanceCounters
from spec_core.wording import counted
from spec_kit.hosting.modes import CaptureMode, PlainMode, SpeculativeMode
from spec_kit.hosting.program_replicas import ProgramReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from spec_core import Draft, EngineConfig, EngineContext, TargetSpec
    from spec_core.records import (
        CaptureRequest,
        FeatureSchema,
        Generation,
        GenerationRequest,
        SamplingParams,
    )
    from spec_kit.hosting.engine_subprocess import EngineSubprocess
    from spec_kit.hosting.modes import Fields, Mode

R = TypeVar("R")


class SubprocessEngine(Engine):
    """Starts the program at the first call that needs it, and restarts it if a call needs another mode.

    One thread owns the program and executes calls one after the other. It hands a whole capture batch to the program
    and does not wait for the features, so the program runs one batch after the other without a pause. The engine's
    process uses no device.
    """

    def __init__(self, config: EngineConfig, target: TargetSpec, context: EngineContext) -> None:
        """Store the arguments and start the thread that owns the program; the program starts later."""
        super().__init__(config, target, context)
        self._draft: tuple[Draft, Path] | None = None
        self._loads = 0
        self._counted = AcceptanceCounters()
        self._process: EngineSubprocess | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-engine")

    @abstractmethod
    def start_program(self, mode: Mode) -> EngineSubprocess:
        """Start the program in ``mode``, and return at once without waiting until it is ready."""

    @abstractmethod
    def limit(self, mode: Mode) -> tuple[int, str]:
        """Return the largest number of tokens of a sample, or of a prompt with its answer, in ``mode``.

        Also return the name of the setting that limits it.
        """

    @classmethod
    def method_of(cls, config: EngineConfig, draft: Draft) -> str | None:
        """Return the name of the draft's speculative method in the program's arguments, or None."""
        return draft.serving_methods.get(cls.name)

    @classmethod
    def serving_method(cls, config: EngineConfig, draft: Draft, folder: Path) -> str:
        """Return the name of the draft's speculative method. Raise ArtifactError if it has none."""
        if (method := cls.method_of(config, draft)) is None:
            raise ArtifactError(
                f"draft {folder} cannot be served by engine {cls.name!r}: plugin {draft.name!r} names no method of "
                f"this engine; its serving_methods name {_engines(draft)}"
            )
        return method

    @classmethod
    def check_method(cls, config: EngineConfig, draft: Draft) -> None:
        """Raise ConfigError if the program has no speculative method for the draft (E8)."""
        if cls.method_of(config, draft) is None:
            raise ConfigError(
                f"engine.name={cls.name}: it does not serve draft {draft.name!r} with these options; its "
                f"serving_methods name {_engines(draft)}"
            )

    def start(self, schema: FeatureSchema) -> None:
        """Start the program for captures and wait until it is ready (E9)."""
        self._submit(lambda: self._capturing(schema)).result()

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        """Hand the batch of requests to the program and return at once (E1-E3)."""
        done: Future[None] = Future()

        def begin() -> None:
            longest, setting = self.limit(CaptureMode(schema))
            for request in requests:
                self._check_tokens(request.input_ids, longest, setting, "a sample")
            self._capturing(schema).capture(requests, done)

        def begun(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                done.set_exception(error)

        self._submit(begin).add_done_callback(begun)
        return done

    def generate_unordered(
        self, next_request: Callable[[], GenerationRequest | None], sampling: SamplingParams
    ) -> Generator[tuple[GenerationRequest, Generation]]:
        """Yield requests with the program's answers, as the answers end (E4, E19).

        The program has more requests than it answers at once, so that it begins the next one in the step after an
        answer's end.
        """
        pending: dict[GenerationRequest, Future[Generation]] = {}
        ended: SimpleQueue[GenerationRequest] = SimpleQueue()
        try:
            while True:
                while len(pending) < self._most_pending(sampling) and (request := next_request()) is not None:
                    pending[request] = self._submit(
                        lambda asked=request: self._begin(asked, sampling)
                    ).result()
                    pending[request].add_done_callback(lambda _, asked=request: ended.put(asked))
                if not pending:
                    return
                request = ended.get()
                yield request, pending.pop(request).result()
        finally:
            for answer in pending.values():
                answer.cancel()

    def load_draft(self, folder: Path) -> None:
        """Check the draft in ``folder``; the program reads it when it next decodes with a draft."""
        from spec_kit.drafting.draft_folder import recognise

        draft = recognise(folder, self.target)
        self.check_draft(self.config, self.target, draft, folder, num_draft_tokens=1)

        def use() -> None:
            self._draft = (draft, folder.resolve())
            self._counted = AcceptanceCounters()
            self._loads += 1

        self._submit(use).result()

    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since the last ``load_draft``, summed over program starts (E5)."""
        return self._submit(self._acceptance).result()

    def program_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts | None:
        """Return the products that the running program computes; None if it cannot (E17).

        It is for ``frozen_products`` of an engine whose program answers requests of kind ``frozen`` with the fields
        of FrozenProducts, or with none. Their field ``embedding`` names the embedding's module. Raise EngineError if
        no program runs.
        """
        process = self._process
        if process is None:
            raise EngineError(f"engine {self.name!r} runs no program yet; start it first")
        table = self.target.embedding_name.split(".")[-2]
        asked = process.ask("frozen", embedding=table, token_ids=list(token_ids), vector=list(vector))
        fields = asked.result(self.context.peer_s)
        if "dtypes" not in fields:
            return None
        return FrozenProducts(**{name: tuple(fields[name]) for name in ("embedding", "head", "dtypes")})

    def program_replica(self, num_ranks: int) -> ProgramReplica:
        """Return the replica by which new weights of the loaded draft are pushed to the program.

        It is for ``draft_replica`` of an engine whose program answers requests of kind ``draft``. Raise
        EngineError if no draft is loaded.
        """
        if self._draft is None:
            raise EngineError(
                f"engine {self.name!r} has no draft whose weights could be fresh; load one first"
            )
        return ProgramReplica(self._ask_draft, num_ranks)

    def _ask_draft(self, call: str, argument: str) -> Future[Fields]:
        """Send a call about the draft to the program at once, without waiting for queued calls.

        The future fails with EngineError if no program serves a draft.
        """
        process = self._process
        if process is None or not isinstance(process.mode, SpeculativeMode):
            refused: Future[Fields] = Future()
            refused.set_exception(
                EngineError(
                    f"engine {self.name!r} serves no draft now: it begins at the first call that drafts"
                )
            )
            return refused
        answer = process.ask("draft", call=call, argument=argument)
        if call in ("commit", "revert"):
            answer.add_done_callback(self._count_anew)
        return answer

    def _count_anew(self, changed: Future[Fields]) -> None:
        """Reset the counters of earlier starts of the program; the running program resets its own."""
        if changed.exception() is None:
            self._counted = AcceptanceCounters()

    def health(self) -> None:
        """Raise EngineError if the program has ended or the engine is closed (E6)."""
        self._check_open()
        if (process := self._process) is not None:
            process.health()

    def close(self) -> None:
        """Stop the program. A call in progress, or a start, fails with EngineError."""
        self._closing.set()
        if (process := self._process) is not None:
            process.close()
        self._thread.shutdown(wait=True)
        if (process := self._process) is not None:  # it was under construction above
            process.close()

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        def run() -> R:
            self._check_open()
            return work()

        self._check_open()
        return self._thread.submit(run)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineError(f"the {self.name} engine is closed")

    def _program(self, mode: Mode) -> EngineSubprocess:
        """Return the program running in ``mode``; first stop a program that runs in another mode."""
        if (process := self._process) is not None:
            process.health()  # a restart must not hide that the program has died
            if process.mode == mode:
                return process
        if self._draft is not None and isinstance(mode, SpeculativeMode):
            self.check_draft(self.config, self.target, *self._draft, mode.num_draft_tokens)
        if process is not None:
            process.drain()
            self._counted = self._acceptance()
            self._process = None
            process.close()
        self._process = process = self.start_program(mode)
        try:
            self._check_open()  # a close that came before this line did not see the process
            process.wait_ready()
        except BaseException:
            self._process = None
            process.close()
            raise
        return process

    def _capturing(self, schema: FeatureSchema) -> EngineSubprocess:
        if self.context.placement is None:
            raise EngineError("this engine was built without a placement: it can generate, not capture")
        self.check_schema(schema)
        return self._program(CaptureMode(schema))

    def _begin(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Generation]:
        mode = self._decoding_mode(sampling.num_draft_tokens)
        longest, setting = self.limit(mode)
        what = f"a prompt with {counted(sampling.max_new_tokens, 'new token')}"
        self._check_tokens(request.prompt, longest - sampling.max_new_tokens, setting, what)
        return self._program(mode).generate(request, sampling)

    def _most_pending(self, sampling: SamplingParams) -> int:
        """Return how many requests the program may have; one until it runs."""
        process = self._process
        most = 1 if process is None else 2 * process.at_once
        return min(most, sampling.concurrency or most)

    def _check_tokens(self, token_ids: Sequence[int], longest: int, setting: str, what: str) -> None:
        """Raise EngineError for tokens for which the program would crash, instead of refusing the request."""
        if not 0 < len(token_ids) <= longest:
            raise EngineError(
                f"{what} has {counted(len(token_ids), 'token')}, expected 1 to {longest}; see {setting}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.target.vocab_size:
            raise EngineError(
                f"{what} has token ids from {min(token_ids)} to {max(token_ids)}, target {self.target.folder} has "
                f"0 to {self.target.vocab_size - 1}"
            )

    def _decoding_mode(self, num_draft_tokens: int) -> Mode:
        if num_draft_tokens == 0:
            return PlainMode()
        if self._draft is None:
            raise EngineError("draft tokens are wanted, but no draft is loaded")
        draft, folder = self._draft
        method = self.serving_method(self.config, draft, folder)
        return SpeculativeMode(
            folder=folder, method=method, num_draft_tokens=num_draft_tokens, load=self._loads
        )

    def _acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters, summed over all starts of the program since the last load."""
        process = self._process
        if process and isinstance(process.mode, SpeculativeMode) and process.mode.load == self._loads:
            return self._counted + process.acceptance()
        return self._counted


def _engines(draft: Draft) -> str:
    return ", ".join(sorted(draft.serving_methods)) or "no engine"
