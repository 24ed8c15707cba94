"""SglangProcess is the engine's handle of the process that runs SGLang, by ``subprocess_main``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from spec_core import EngineContext, TargetSpec
from spec_core.records import AcceptanceCounters, CaptureRequest, GenerationRequest, SamplingParams
from spec_engine_sglang import hook
from spec_engine_sglang.arguments import ENVIRONMENT, server_arguments
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.request_names import GENERATED, Assignment, name_of
from spec_kit.hosting import CaptureMode, EngineSubprocess, Fields, Mode, SpeculativeMode, image_fields, then


class SglangProcess(EngineSubprocess):
    """The process of SGLang's Python engine and the processes that SGLang starts."""

    program: ClassVar[str] = "SGLang"
    module: ClassVar[str] = "spec_engine_sglang.subprocess_main"
    extension: ClassVar[str] = (
        f"the plugin {hook.PLUGIN!r} (entry-point group 'sglang.srt.plugins' of spec-engine-sglang); its log says "
        "which plugins it found"
    )

    def __init__(self, config: SglangConfig, target: TargetSpec, context: EngineContext, mode: Mode) -> None:
        """Start the process for ``mode``."""
        self._config = config
        self._target = target
        self._counted = AcceptanceCounters()
        self._calls = count()
        env = {**os.environ, **ENVIRONMENT}
        if isinstance(mode, CaptureMode):
            norm = target.norm_name.split(".")[-2]
            token = target.image_token_id
            image = () if token is None else (target.vocab_size, token)
            env |= hook.hook_environment(norm, os.environ, image)
        elif isinstance(mode, SpeculativeMode):
            env |= hook.update_environment(os.environ)
        arguments = server_arguments(config, target, context.memory_fraction, mode)
        super().__init__(config, context, mode, arguments, env)

    def prefill(self, requests: Sequence[CaptureRequest]) -> Future[Fields]:
        """Send the requests of a capture batch; the future is done when SGLang has answered all requests."""
        call = next(self._calls)
        names = [name_of(Assignment(r.request_id, len(r.input_ids), r.destinations), call) for r in requests]
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        images = [[image_fields(image) for image in request.images] for request in requests]
        ids = [list(request.input_ids) for request in requests]
        return self.ask("prefill", names=names, ids=ids, sampling=sampling, images=images)

    def decode(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Fields]:
        """Send a request to SGLang; the future returns its answer."""
        greedy_plain = sampling.temperature == 0 and sampling.num_draft_tokens == 0
        answer = self.ask(
            "answer",
            name=f"{GENERATED}{next(self._calls)}-",  # SGLang aborts every request whose name begins with a name
            ids=list(request.prompt),
            sampling=self._sampling(sampling),
            gaps=greedy_plain and sampling.with_margins and self._config.gaps,
            times=sampling.with_times,
        )
        return then(answer, lambda fields: self._count(fields, sampling.num_draft_tokens))

    def _count(self, answer: Fields, drafted: int) -> Fields:
        """Return SGLang's answer with its fields in this project's form, and count its verifications."""
        if len(answer["accepted"]) > drafted:  # a round that reports more has accepted every guess
            answer["accepted"][drafted:] = [sum(answer["accepted"][drafted:])]
        answer["depths"] = [depth if depth <= drafted else 0 for depth in answer["depths"]]
        for accepted, rounds in enumerate(answer["accepted"]):
            self._counted += AcceptanceCounters.of_rounds(drafted, accepted, rounds)
        return answer

    def ask(self, kind: str, **fields: Any) -> Future[Fields]:
        """Send a request. A request that changes the draft resets the acceptance counters."""
        answer = super().ask(kind, **fields)
        if kind == "draft" and fields["call"] in ("commit", "revert"):
            answer.add_done_callback(self._count_anew)
        return answer

    def _count_anew(self, changed: Future[Fields]) -> None:
        if changed.exception() is None:
            self._counted = AcceptanceCounters()

    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since the process started or the draft last changed."""
        return self._counted

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": not sampling.stop_at_eos,
            "stop_token_ids": list(self._target.eos_token_ids),
        }

    def left_files(self, pids: Sequence[int]) -> Iterator[Path]:
        """Yield the shared-memory files that a killed SGLang leaves behind."""
        yield from map(Path, self.ready.get("files", ()))
        for pid in pids:
            yield from Path("/dev/shm").glob(f"sgl_shm_*_{pid}_*")
