"""Draft: a drafting algorithm, single-device code only.

Contract (``spec_core.testing.DraftSuite`` quotes the numbers):

D1  The class imports without torch; ``Config`` derives from DraftConfig. No optimizer, no collective, no device
    string anywhere in the plugin.
D2  ``check_target`` raises TargetError for what the draft cannot express (too few layers, a soft-capped or
    biased head, another norm); what it accepts, it expresses exactly. ``required_features`` may then be asked.
D3  ``build`` returns a module whose parameters are exactly what is trained and whose buffers (the vocabulary
    mapping) are checkpoint state; with ``config.init_from`` both come from that folder.
D4  The module's ``forward(batch, denominators, ops) -> StepOutput`` touches every parameter, also for a batch
    without a supervised token, and is called once per micro-batch.
D5  Shares add up: the loss and gradients of a global batch do not depend on how it is cut into micro-batches,
    packed or padded. A denominator of 0 gives loss 0 and zero gradients on every parameter.
D6  ``denominators`` needs no model: the global batch's denominators are the sum over its samples, so any
    number of ranks computes the same ones.
D7  Metrics are ratios of sums; ``acceptance_length`` is one of them, ``accuracy`` (per draft position) another.
D8  ``exported_config`` and ``exported_tensors`` make a folder that the engines in ``serving_methods`` load;
    ``from_folder`` recognises it, and building from it gives the same weights, bit for bit in the stored dtype.
D9  ``proposer`` drafts exactly as the engines do: its proposals are those of the module's own forward pass.
    ``max_draft_tokens`` is the most that one proposal can hold: a block's guesses; None where a chain goes on.
D10 ``kernels`` declares every kernel that the module may use, with an example for each that has a plain version.
    With a backend's kernels a step differs from the plain one by rounding only.
D11 ``target_tensors`` names every tensor that ``build`` takes from ``TargetTensors.others``. What stays as the target
    has it becomes a buffer that is not persistent: neither a parameter nor in the state dict, and never exported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from spec_core.config import DraftConfig
from spec_core.kernels import FindKernel, KernelSet, no_kernel
from spec_core.records import Availability, ShardHints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Generator, Tensor, nn

    from spec_core.ops import VocabularyOps
    from spec_core.records import FeatureSchema, Supervision
    from spec_core.target import TargetSpec, TargetTensors


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a proposer guesses after the last known token."""

    token_ids: tuple[int, ...]
    """K guesses in the target's vocabulary."""
    probs_KV: Tensor | None = None
    """float32 [K, V]: the distribution that each guess was drawn from; None for a deterministic proposal, whose
    distribution puts all mass on the guess."""


class Proposer(ABC):
    """Drafting for one sequence during reference decoding; holds what the draft caches about it."""

    @abstractmethod
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Takes the target's states of T more positions, each with the token that *follows* it.

        The last of ``next_ids`` is the last known token: its own state does not exist yet.
        """

    @abstractmethod
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guesses the ``num_tokens`` tokens after the last known one; forgets them again afterwards.

        ``temperature`` 0 takes arg-maxima; else guesses are drawn from the draft's distribution at that temperature.
        """


class Draft(ABC):
    """See the module's contract. Constructed with its validated section of the configuration."""

    name: ClassVar[str]
    api_version: ClassVar[int]
    Config: ClassVar[type[DraftConfig]] = DraftConfig
    small_run: ClassVar[Mapping[str, object]] = {}
    """Keys of section ``draft`` for a target of a few million parameters and minutes of training: what the quickstart
    sets."""
    serving_methods: ClassVar[Mapping[str, str]] = {}
    """Name of an engine plugin -> that engine's own name of the method that serves this draft's exports, such as the
    value of vLLM's ``speculative_config.method``. An engine that is not named does not serve them, unless it finds a
    method by itself."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config

    @classmethod
    def probe(cls) -> Availability:
        return Availability(ok=True)

    @classmethod
    def kernels(cls) -> type[KernelSet]:
        """D10: the kernels that the draft can use. Imports torch."""
        return KernelSet

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """D8: the draft of an exported folder (``init_from`` set to it), or None if it is another algorithm's.

        Raises ArtifactError where the folder is this algorithm's but damaged.
        """

    @abstractmethod
    def check_target(self, target: TargetSpec) -> None:
        """D2."""

    def target_tensors(self, target: TargetSpec) -> Sequence[str]:
        """D11: further tensors of the target that the draft needs, by their names in the target's folder."""
        return ()

    @abstractmethod
    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Layers to capture; ascending."""

    @abstractmethod
    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """D6: float64 [S], summed over the samples given, on the CPU."""

    @abstractmethod
    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        """D3: float32 parameters on the CPU. ``token_counts``: int64 [V], how often each token is supervised in
        the training data; None counts as all equal. Draws its initial weights from torch's global generator.
        ``kernel``: the backend's, for the names that ``kernels`` declares."""

    @abstractmethod
    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        """D8: the fields of the exported config.json, in their order."""

    @abstractmethod
    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """D8: the exported tensors one by one, under the names and in the dtypes that engines load. ``weights``: full
        tensors under the module's own state-dict names."""

    @abstractmethod
    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """D9: a fresh proposer for one sequence."""

    @property
    def max_draft_tokens(self) -> int | None:
        """D9: for a draft that ``from_folder`` gave."""
        return None

    def shard_hints(self) -> ShardHints:
        return ShardHints()
