"""Engine: the process or processes that run the target.

Contract (``spec_core.testing.EngineSuite`` quotes the numbers):

E1  ``capture`` sends exactly one FeatureSample per request, with the request's sample id and token ids echoed,
    to the request's destination, and nothing to any other place.
E2  Layer k of the schema is the residual stream entering target layer k; k = num_layers is the input of the
    final norm. Values do not depend on which requests share a batch, beyond rounding.
E3  The returned future is done when every sample was handed to its transport; an error of the target or of a
    send ends up in it, never in a log only.
E4  ``generate`` without draft tokens is plain decoding; greedy output with a draft equals it token by token (in
    float32). Sampled output follows the target's law exactly, with a draft or without.
E5  ``load_draft`` checks the whole folder before it changes anything; ``acceptance`` counts from the last load.
E6  ``health`` raises EngineError when the engine cannot serve; ``close`` is idempotent and leaves nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from spec_core.config import EngineConfig
from spec_core.records import AcceptanceCounters, Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import torch

    from spec_core.records import CaptureRequest, FeatureSchema, Generation, SamplingParams
    from spec_core.target import TargetSpec
    from spec_core.transport import Transport


class Engine(Resource):
    """See the module's contract. ``transport`` is how this engine's workers reach the trainers; an engine that
    only generates needs none."""

    name: ClassVar[str]
    api_version: ClassVar[int]
    Config: ClassVar[type[EngineConfig]] = EngineConfig

    def __init__(
        self,
        config: EngineConfig,
        target: TargetSpec,
        device: torch.device,
        transport: Transport | None = None,
    ) -> None:
        self.config = config
        self.target = target
        self.device = device
        self.transport = transport

    @classmethod
    def probe(cls) -> Availability:
        return Availability(ok=True)

    @abstractmethod
    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        """E1–E3: starts one capture batch and returns at once. The caller fixes the batch; the engine may cut it
        into forward passes of at most ``config.batch_tokens``."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        """E4: answers in the prompts' order."""

    @abstractmethod
    def load_draft(self, folder: Path) -> None:
        """E5: the exported draft that ``generate`` speculates with from now on. ArtifactError if it is not one."""

    @abstractmethod
    def acceptance(self) -> AcceptanceCounters:
        """E5."""

    @abstractmethod
    def health(self) -> None:
        """E6."""
