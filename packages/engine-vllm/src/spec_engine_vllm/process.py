"""VllmProcess: vLLM as its engine asks it; ``host.py`` is what it talks to."""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.errors import DeadlineExceeded
from spec_core.hosting.host_process import EngineSubprocess
from spec_core.records import AcceptanceCounters
from spec_engine_vllm.arguments import DEFAULT_ENVIRONMENT, engine_arguments, forced_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from spec_core.engine import EngineContext
    from spec_core.hosting.modes import Mode
    from spec_core.processes.control import Record
    from spec_core.records import CaptureRequest, SamplingParams
    from spec_core.target import TargetSpec
    from spec_engine_vllm.config import VllmConfig

_LONGEST_FOLDER = 107 - len("/") - 36
"""A socket's path has 107 characters at most, and vLLM's sockets are called by a UUID."""
_POINTER = re.compile("Engine core initialization failed|EngineCore encountered an issue|exit code")
"""What says that something has failed, but not of what; vLLM's engine core has logged that before."""


class VllmProcess(EngineSubprocess):
    program: ClassVar[str] = "vLLM"
    module: ClassVar[str] = "spec_engine_vllm.host"
    our_part: ClassVar[str] = "the connector of spec-trainer; its log says why"
    grace_s: ClassVar[float] = 10.0

    def __init__(
        self,
        config: VllmConfig,
        target: TargetSpec,
        context: EngineContext,
        mode: Mode,
        desk_address: str | None,
    ) -> None:
        self._target = target
        self._peer_s = context.peer_s
        self._sockets = _socket_folder()
        env = {
            **DEFAULT_ENVIRONMENT,
            **os.environ,
            **forced_environment(desk_address),
            "VLLM_RPC_BASE_PATH": self._sockets.name,
        }
        super().__init__(engine_arguments(config, target, context, mode), env, context)

    def wait_ready(self) -> None:
        super().wait_ready()
        # Every socket is connected by now; gone here, its file does not outlive a process that is killed.
        self._sockets.cleanup()

    def prefill(self, keys: Sequence[int], requests: Sequence[CaptureRequest]) -> Future[Record]:
        samplings = (
            {
                "max_tokens": 1,
                "temperature": 0.0,
                "extra_args": {"kv_transfer_params": {"capture_key": key}},
            }
            for key in keys
        )
        return self._run([request.input_ids for request in requests], samplings)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Record]:
        samplings = (self._sampling(sampling, index) for index in range(len(prompts)))
        return self._run(prompts, samplings).result()["answers"]

    def acceptance(self) -> AcceptanceCounters:
        try:
            counted = self.ask("counters").result(self._peer_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"vLLM told no counters within timeouts.peer_s={self._peer_s} s"
            ) from error
        return AcceptanceCounters(
            rounds=counted["rounds"],
            drafted=counted["drafted"],
            accepted=counted["accepted"],
            accepted_per_position=tuple(counted["accepted_per_position"]),
        )

    def close(self) -> None:
        super().close()
        self._sockets.cleanup()

    def _run(self, prompts: Sequence[Sequence[int]], samplings: Iterable[dict[str, Any]]) -> Future[Record]:
        requests = [
            {"ids": list(ids), "sampling": sampling} for ids, sampling in zip(prompts, samplings, strict=True)
        ]
        return self.ask("run", requests=requests)

    def _sampling(self, sampling: SamplingParams, index: int) -> dict[str, Any]:
        """vLLM's, for prompt ``index``: a sampled answer depends on the seed and the prompt's place alone."""
        greedy_plain = sampling.temperature == 0 and sampling.num_draft_tokens == 0
        return {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed * 1_000_003 + index,
            "stop_token_ids": list(self._target.eos_token_ids) if sampling.stop_at_eos else [],
            "logprobs": 2 if greedy_plain and sampling.with_gaps else None,
        }

    def _explained(self, message: str) -> str:
        """With the last error that vLLM's processes have logged, where the message only points there."""
        causes = [cause for cause in self._logged_errors() if not _POINTER.search(cause)]
        if not causes or not _POINTER.search(message):
            return message
        return f"{message}: {causes[-1]}" if "exit code" in message else causes[-1]


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    parent, prefix = tempfile.gettempdir(), "spec-vllm-"
    fits = len(f"{parent}/{prefix}") + 8 <= _LONGEST_FOLDER  # tempfile adds 8 characters
    return tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent if fits else "/tmp", ignore_cleanup_errors=True
    )
