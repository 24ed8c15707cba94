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
E6  ``health`` raises EngineError when the engine cannot serve; ``close`` is idempotent and leaves nothing. ``health``
    may be called from any thread, also while the engine works.
E7  ``in_process`` says where the target runs: in the process that built the engine, which may then train as well
    (placement ``inline``), or in processes of the engine's own, which build their transport themselves from ``Site``.
E8  ``check_draft`` finds from files alone, before anything starts, that this engine cannot serve a draft folder or
    so many draft tokens a round: UsageError, one line. Optional: by default every draft is accepted.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from spec_core.config import EngineConfig
from spec_core.records import AcceptanceCounters, Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import torch

    from spec_core.backend import Backend, Placement
    from spec_core.records import CaptureRequest, FeatureSchema, Generation, SamplingParams
    from spec_core.target import TargetSpec
    from spec_core.transport import Transport


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where an engine runs: on the devices that its process sees (B4)."""

    backend: Backend
    placement: Placement | None = None
    """How its features reach the trainers; None: it only generates."""
    memory_fraction: float | None = None
    """Share of each device's memory that it may take; None leaves it to the engine."""
    start_s: float = 600.0
    """For processes of its own to be ready."""
    peer_s: float = 120.0
    """Silence after which one of them counts as lost."""


class Engine(Resource):
    """See the module's contract. ``transport`` is how this engine's workers reach the trainers; an engine that
    only generates needs none."""

    name: ClassVar[str]
    api_version: ClassVar[int]
    Config: ClassVar[type[EngineConfig]] = EngineConfig
    in_process: ClassVar[bool] = True
    """E7."""

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

    @classmethod
    def at(
        cls, config: EngineConfig, target: TargetSpec, site: Site, transport: Transport | None = None
    ) -> Self:
        """E7: the engine, running at ``site``. ``transport``: this process's own, which the trainer of an inline run
        shares; by default ``site`` gives one."""
        if site.memory_fraction is not None:
            site.backend.limit_memory(site.memory_fraction)
        if transport is None and site.placement is not None:
            transport = site.backend.transport(site.placement)
        return cls(config, target, site.backend.device(0), transport)

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, folder: Path, num_draft_tokens: int
    ) -> None:
        """E8. The draft's plugin has read ``folder`` before and found it whole and made for ``target``; what is left
        is what this engine reads differently, or not at all."""

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
