"""LlamacppProcess is the engine's handle of the process that runs llama.cpp's server, by ``subprocess_main``."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from spec_core import EngineContext, TargetSpec
from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters, CaptureRequest, GenerationRequest, SamplingParams
from spec_engine_llamacpp.config import LlamacppConfig
from spec_kit.hosting import EngineSubprocess, Fields, Mode, SpeculativeMode, then

_CAUSE = re.compile(r"(?:error loading model: |(?=GGML_(?:ASSERT|ABORT)))(.+)$")
"""Finds the cause in a line of llama.cpp's log; what Python reports behind it says nothing."""
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Else OpenMP's threads spin at each barrier, and a shared core makes every pass a hundred times slower."""


class LlamacppProcess(EngineSubprocess):
    """The process in which llama.cpp's server runs; an assertion of its code ends the whole process."""

    program: ClassVar[str] = "llama.cpp"
    module: ClassVar[str] = "spec_engine_llamacpp.subprocess_main"
    extension: ClassVar[str] = "any capture of states"

    def __init__(
        self, config: LlamacppConfig, target: TargetSpec, context: EngineContext, mode: Mode, file: Path
    ) -> None:
        """Start the process for ``mode``; ``file``: the target's GGUF file."""
        self._counted = AcceptanceCounters()
        self._ends = list(target.eos_token_ids)
        self._reuses_prefixes = context.reuse_prefixes
        positions = min(config.context, target.max_positions)
        arguments: dict[str, Any] = {
            "gguf": str(file),
            "threads": config.threads,
            "slots": config.slots,
            "context": positions,
            "float32": config.attention == "f32",
            "draft": None,
        }
        self._draft_file: Path | None = None
        if isinstance(mode, SpeculativeMode):
            self._draft_file = _written(mode.folder, target, file, config)
            arguments["draft"] = {
                "file": str(self._draft_file),
                "method": mode.method,
                "tokens": mode.num_draft_tokens,
            }
        super().__init__(config, context, mode, arguments, {**os.environ, **_ENVIRONMENT})

    def prefill(self, requests: Sequence[CaptureRequest]) -> Future[Fields]:
        """Raise EngineError: the server hands out no hidden states."""
        raise EngineError("llama.cpp captures no hidden states")

    def decode(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Fields]:
        """Send a request to the server; the future returns its answer."""
        greedy_plain = sampling.temperature == 0 and sampling.num_draft_tokens == 0
        answer = self.ask(
            "answer",
            ids=list(request.prompt),
            ends=self._ends if sampling.stop_at_eos else [],
            max_new_tokens=sampling.max_new_tokens,
            drafted=sampling.num_draft_tokens,
            sampling={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": -1 if request.seed is None else request.seed % (1 << 32),
                "cache_prompt": self._reuses_prefixes,
                "n_probs": 2 if greedy_plain and sampling.with_margins else 0,
            },
        )
        return then(answer, self._count)

    def _count(self, answer: Fields) -> Fields:
        """Count an answer's verifications, each a pair of drafted and accepted guesses."""
        rounds = answer.pop("rounds")
        accepted = [0] * (1 + max((accepted for _, accepted in rounds), default=-1))
        for drafted, right in rounds:
            self._counted += AcceptanceCounters.of_rounds(drafted, right)
            accepted[right] += 1
        return answer | {"accepted": accepted}

    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since the process started."""
        return self._counted

    def logged_errors(self) -> list[str]:
        """Return why llama.cpp did not load a file, or which assertion failed; else the errors of Python."""
        found = [cause[1] for line in self._last_lines if (cause := _CAUSE.search(line))]
        return found or super().logged_errors()

    def left_files(self, pids: Sequence[int]) -> Iterable[Path]:
        """Return the draft's file, which the process removes once it has read it."""
        return () if self._draft_file is None else (self._draft_file,)


def _written(folder: Path, target: TargetSpec, file: Path, config: LlamacppConfig) -> Path:
    """Write the draft in ``folder`` as a temporary GGUF file, and return it."""
    from spec_engine_llamacpp.draft_gguf import write_draft_gguf

    output = Path(tempfile.gettempdir()) / f"spec-draft-{secrets.token_hex(8)}.gguf"
    write_draft_gguf(folder, target, file, output, config.draft_type)
    return output
