"""SglangProcess: SGLang as its engine asks it; ``host.py`` is what it talks to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.hosting.host_process import EngineSubprocess
from spec_core.hosting.modes import SpeculativeMode
from spec_core.hosting.tally import Tally
from spec_engine_sglang import hook
from spec_engine_sglang.arguments import ENVIRONMENT, server_arguments
from spec_engine_sglang.request_names import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from spec_core.engine import EngineContext
    from spec_core.hosting.modes import Mode
    from spec_core.processes.control import Record
    from spec_core.records import AcceptanceCounters, CaptureRequest, SamplingParams
    from spec_core.target import TargetSpec
    from spec_engine_sglang.config import SglangConfig


class SglangProcess(EngineSubprocess):
    program: ClassVar[str] = "SGLang"
    module: ClassVar[str] = "spec_engine_sglang.host"
    our_part: ClassVar[str] = (
        f"the plugin {hook.PLUGIN!r} (entry-point group 'sglang.srt.plugins' of spec-engine-sglang); its log says "
        "which plugins it found"
    )

    def __init__(
        self,
        config: SglangConfig,
        target: TargetSpec,
        context: EngineContext,
        mode: Mode,
        desk_address: str | None,
    ) -> None:
        self._config = config
        self._target = target
        self._num_draft_tokens = mode.num_draft_tokens if isinstance(mode, SpeculativeMode) else 0
        self._tally = Tally()
        env = {**os.environ, **ENVIRONMENT}
        if desk_address is not None:
            env |= hook.environment(desk_address, target.norm_name.split(".")[-2], os.environ)
        super().__init__(server_arguments(config, target, context.memory_fraction, mode), env, context)

    def prefill(self, keys: Sequence[int], requests: Sequence[CaptureRequest]) -> Future[Record]:
        names = [name_of(key, len(r.input_ids)) for key, r in zip(keys, requests, strict=True)]
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        return self._run(names, [request.input_ids for request in requests], sampling)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Record]:
        names = [f"spec-generate-{index}-{time.monotonic_ns()}" for index in range(len(prompts))]
        greedy_plain = sampling.temperature == 0 and not self._num_draft_tokens
        gaps = greedy_plain and sampling.with_gaps and self._config.gaps
        answers = self._run(names, prompts, self._sampling(sampling), gaps=gaps).result()["answers"]
        for answer in answers:
            for accepted, rounds in enumerate(answer["accepted"]):
                self._tally.add(self._num_draft_tokens, min(accepted, self._num_draft_tokens), rounds)
        return answers

    def acceptance(self) -> AcceptanceCounters:
        return self._tally.counters()

    def _run(
        self,
        names: Sequence[str],
        ids: Sequence[Sequence[int]],
        sampling: dict[str, Any],
        gaps: bool = False,
    ) -> Future[Record]:
        return self.ask("run", names=names, ids=[list(row) for row in ids], sampling=sampling, gaps=gaps)

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": not sampling.stop_at_eos,
            "stop_token_ids": list(self._target.eos_token_ids),
        }

    def _left_files(self, pids: Sequence[int]) -> Iterator[Path]:
        yield from map(Path, self.ready.get("files", ()))
        for pid in pids:
            yield from Path("/dev/shm").glob(f"sgl_shm_*_{pid}_*")
