"""VllmProcess is the engine's handle of the process that runs vLLM, by ``subprocess_main``."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from spec_core import EngineContext, TargetSpec
from spec_core.errors import DeadlineExceeded
from spec_core.records import (
    AcceptanceCounters,
    CaptureRequest,
    GenerationRequest,
    ImageSource,
    SamplingParams,
    images_of,
)
from spec_engine_vllm.arguments import CAPTURE_ENVIRONMENT, DEFAULT_ENVIRONMENT, engine_arguments
from spec_engine_vllm.config import VllmConfig
from spec_kit.hosting import CaptureMode, EngineSubprocess, Fields, Mode, image_fields, then

_LONGEST_FOLDER = 107 - len("/") - 36
"""Maximum length, in characters, of the path of the folder for vLLM's sockets. A socket's path has at most
107 characters, and its name is a UUID."""
_POINTER = re.compile("Engine core initialization failed|EngineCore encountered an issue|exit code")
"""Messages that report a failure without its cause. vLLM's engine core has logged the cause before."""


class VllmProcess(EngineSubprocess):
    """The process of vLLM's frontend and the processes that vLLM starts."""

    program: ClassVar[str] = "vLLM"
    module: ClassVar[str] = "spec_engine_vllm.subprocess_main"
    extension: ClassVar[str] = "the connector of spec-trainer; its log says why"
    grace_s: ClassVar[float] = 10.0

    def __init__(self, config: VllmConfig, target: TargetSpec, context: EngineContext, mode: Mode) -> None:
        """Start the process for ``mode``."""
        self._target = target
        self._peer_s = context.peer_s
        self._sockets = _socket_folder()
        env = {**DEFAULT_ENVIRONMENT, **os.environ, "VLLM_RPC_BASE_PATH": self._sockets.name}
        if isinstance(mode, CaptureMode):
            env |= CAPTURE_ENVIRONMENT
        super().__init__(config, context, mode, engine_arguments(config, target, context, mode), env)

    def wait_ready(self) -> None:
        """Wait until vLLM is ready, then delete its sockets' files, because all sockets are then connected."""
        super().wait_ready()
        # Every socket is connected by now. A file that is deleted here cannot outlive a process that is killed.
        self._sockets.cleanup()

    def prefill(self, requests: Sequence[CaptureRequest]) -> Future[Fields]:
        """Send the requests of a capture batch; the future is done when vLLM has answered all requests."""
        samplings = (
            {
                "max_tokens": 1,
                "temperature": 0.0,
                "extra_args": {
                    "kv_transfer_params": {
                        "request_id": request.request_id,
                        "destinations": request.destinations,
                        "expected_ids": list(request.input_ids) if request.images else None,
                    }
                },
            }
            for request in requests
        )
        return self._run(
            [request.input_ids for request in requests], samplings, [request.images for request in requests]
        )

    def decode(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Fields]:
        """Send a request to vLLM; the future returns its answer."""
        prompt = request.prompt
        parameters = self._sampling(sampling, request.seed)
        run = self._run([prompt], [parameters], [images_of(prompt)], times=sampling.with_times)
        return then(run, lambda done: done["answers"][0])

    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since the process started or the draft last changed."""
        try:
            counted = self.ask("counters").result(self._peer_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"vLLM sent no counters within timeouts.peer_s={self._peer_s} s"
            ) from error
        return AcceptanceCounters(
            rounds=counted["rounds"],
            drafted=counted["drafted"],
            accepted=counted["accepted"],
            accepted_per_position=tuple(counted["accepted_per_position"]),
        )

    def close(self) -> None:
        """End the process and delete the folder of its sockets."""
        super().close()
        self._sockets.cleanup()

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Iterable[dict[str, Any]],
        images: Sequence[Sequence[ImageSource]],
        times: bool = False,
    ) -> Future[Fields]:
        requests: list[Fields] = [
            {"ids": list(ids), "sampling": sampling} for ids, sampling in zip(prompts, samplings, strict=True)
        ]
        for request, shown in zip(requests, images, strict=True):
            request["images"] = [image_fields(image) for image in shown]
        return self.ask("run", requests=requests, times=times)

    def _sampling(self, sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
        """Return vLLM's sampling parameters of a request; with a seed, vLLM draws for each request by itself."""
        greedy_plain = sampling.temperature == 0 and sampling.num_draft_tokens == 0
        return {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stop_token_ids": list(self._target.eos_token_ids) if sampling.stop_at_eos else [],
            "logprobs": 2 if greedy_plain and sampling.with_margins else None,
        }

    def explain(self, message: str) -> str:
        """Return ``message``, or vLLM's last logged error if ``message`` does not name the cause."""
        causes = [cause for cause in self.logged_errors() if not _POINTER.search(cause)]
        if not causes or not _POINTER.search(message):
            return message
        return f"{message}: {causes[-1]}" if "exit code" in message else causes[-1]


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    parent = tempfile.gettempdir()
    prefix = "spec-vllm-"
    fits = len(f"{parent}/{prefix}") + 8 <= _LONGEST_FOLDER  # tempfile adds 8 characters
    return tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent if fits else "/tmp", ignore_cleanup_errors=True
    )
