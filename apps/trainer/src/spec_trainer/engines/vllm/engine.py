"""VllmEngine: the target run by stock vLLM, in processes of its own. Imports neither torch nor vLLM."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from spec_core.engine import Engine
from spec_core.errors import EngineError, SpecError
from spec_core.records import AcceptanceCounters, Generation
from spec_trainer.engines.vllm import versions
from spec_trainer.engines.vllm.config import VllmConfig
from spec_trainer.engines.vllm.modes import Capturing, Drafting, Plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core.config import EngineConfig
    from spec_core.engine import Site
    from spec_core.records import Availability, CaptureRequest, FeatureSchema, SamplingParams
    from spec_core.target import TargetSpec
    from spec_core.transport import Transport
    from spec_trainer.engines.vllm.modes import Mode
    from spec_trainer.engines.vllm.running import RunningVllm

R = TypeVar("R")


class VllmEngine(Engine):
    """vLLM is started by the first call that needs it, for what that call needs (``modes.py``), and again when a call
    needs something else. One thread owns it; calls are taken in order. A capture batch is handed over whole and not
    waited for, so that vLLM goes from one to the next without a pause; a batch without requests only starts vLLM."""

    name: ClassVar[str] = "vllm"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[EngineConfig]] = VllmConfig
    in_process: ClassVar[bool] = False

    @classmethod
    def probe(cls) -> Availability:
        return versions.availability()

    @classmethod
    def at(
        cls, config: EngineConfig, target: TargetSpec, site: Site, transport: Transport | None = None
    ) -> Self:
        """E7: this process touches no device, and needs no transport of its own."""
        return cls(config, target, site)

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, folder: Path, num_draft_tokens: int
    ) -> None:
        from spec_trainer.engines.serving_formats import check_for_vllm

        check_for_vllm(folder, target, versions.for_processors())

    def __init__(self, config: EngineConfig, target: TargetSpec, site: Site) -> None:
        self.config = config
        self.target = target
        self.transport = None
        self._config = cast("VllmConfig", config)
        self._site = site
        self._draft: tuple[Path, str] | None = None
        self._loads = 0
        self._counted = AcceptanceCounters()
        self._running: RunningVllm | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-engine")

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
        """Restarts nothing: vLLM reads the folder when it is next asked to speculate."""
        from spec_trainer.engines.draft_folder import recognise
        from spec_trainer.engines.serving_formats import check_for_vllm

        draft = recognise(folder)
        draft.check_target(self.target)
        check_for_vllm(folder, self.target, versions.for_processors())

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
            raise EngineError("the vllm engine is closed")

    def _in_mode(self, mode: Mode) -> RunningVllm:
        """vLLM, started for ``mode``."""
        running = self._running
        if running is not None and running.mode == mode:
            return running
        if running is not None:
            running.health()  # a death is told once for all, not restarted away
            running.drain()
            self._counted = self._acceptance()
            self._running = None
            running.close()
        return self._start(mode)

    def _start(self, mode: Mode) -> RunningVllm:
        from spec_trainer.engines.vllm.running import RunningVllm

        self._running = running = RunningVllm(self._config, self.target, self._site, mode)
        try:
            self._check_open()  # whoever closed it may not have seen this one
            running.wait_ready()
        except SpecError:
            self._running = None
            running.close()
            raise
        return running

    def _begin_capture(
        self, requests: list[CaptureRequest], schema: FeatureSchema, done: Future[None]
    ) -> None:
        mode = Capturing(schema)
        self._check_schema(schema)
        for request in requests:
            self._check_tokens(request.input_ids, mode.longest(self._config, self.target), "a sample")
        running = self._in_mode(mode)
        sent = running.capture(requests)
        batch = _Batch(done, len(sent), running.cause)
        for one in sent:
            one.add_done_callback(batch.settle)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        mode = self._decoding_mode(sampling.num_draft_tokens)
        room = mode.longest(self._config, self.target) - sampling.max_new_tokens
        for prompt in prompts:
            self._check_tokens(prompt, room, f"a prompt with {sampling.max_new_tokens} new tokens")
        running = self._in_mode(mode)
        samplings = [self._sampling(sampling, index) for index in range(len(prompts))]
        try:
            answers = running.generate(prompts, samplings)
        except EngineError as error:
            raise running.cause(error) from error
        return [
            Generation(token_ids=tuple(answer["token_ids"]), top_two_gap=tuple(answer["gaps"]))
            for answer in answers
        ]

    def _decoding_mode(self, num_draft_tokens: int) -> Plain:
        if num_draft_tokens == 0:
            return Plain()
        if self._draft is None:
            raise EngineError(f"{num_draft_tokens} draft tokens are wanted, but no draft is loaded")
        folder, method = self._draft
        return Drafting(folder=folder, method=method, num_draft_tokens=num_draft_tokens, load=self._loads)

    def _sampling(self, sampling: SamplingParams, index: int) -> dict[str, Any]:
        """vLLM's, for prompt ``index``: a sampled answer depends on the seed and the prompt's place alone."""
        greedy_plain = sampling.temperature == 0 and sampling.num_draft_tokens == 0
        return {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed * 1_000_003 + index,
            "stop_token_ids": list(self.target.eos_token_ids) if sampling.stop_at_eos else [],
            "logprobs": 2 if greedy_plain and sampling.with_gaps else None,
        }

    def _acceptance(self) -> AcceptanceCounters:
        """Since the last load, over every process that has drafted since."""
        running = self._running
        if running is None or not isinstance(running.mode, Drafting) or running.mode.load != self._loads:
            return self._counted
        return _sum(self._counted, running.acceptance())

    def _check_schema(self, schema: FeatureSchema) -> None:
        target = self.target
        if self._site.placement is None:
            raise EngineError("this engine was built without a placement: it can generate, not capture")
        if schema.hidden_size != target.hidden_size or schema.layers[-1] > target.num_layers:
            raise EngineError(
                f"schema {schema} does not fit target {target.folder}: {target.num_layers} layers of width "
                f"{target.hidden_size}"
            )

    def _check_tokens(self, token_ids: Sequence[int], longest: int, what: str) -> None:
        """vLLM would die of an id outside the vocabulary where it has no tokenizer to look it up in."""
        if not 0 < len(token_ids) <= longest:
            raise EngineError(
                f"{what} has {len(token_ids)} tokens, expected 1 to {longest}; see engine.max_model_len"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.target.vocab_size:
            raise EngineError(
                f"{what} has token ids from {min(token_ids)} to {max(token_ids)}, target {self.target.folder} has "
                f"0 to {self.target.vocab_size - 1}"
            )


class _Batch:
    """``done`` is when all requests are, or when the first of them has failed."""

    def __init__(
        self, done: Future[None], count: int, cause: Callable[[BaseException], BaseException]
    ) -> None:
        self._done, self._left, self._cause = done, count, cause
        self._lock = threading.Lock()
        if not count:
            done.set_result(None)

    def settle(self, one: Future[None]) -> None:
        with self._lock:
            self._left -= 1
            if self._done.done():
                return
            if (error := one.exception()) is not None:
                self._done.set_exception(self._cause(error))
            elif not self._left:
                self._done.set_result(None)


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
