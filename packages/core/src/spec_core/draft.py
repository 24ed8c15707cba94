"""Draft: a drafting algorithm, single-device code only.

Contract (``spec_testing.DraftSuite`` quotes the numbers):

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
    ``extend_all`` and ``propose_all`` do for several sequences what ``extend`` and ``propose`` do for one.
D10 ``kernels`` declares every kernel that the module may use, with an example for each that has a plain version.
    With a backend's kernels a step differs from the plain one by rounding only.
D11 ``target_tensors`` names every tensor that ``build`` takes from ``TargetTensors.others``. What stays as the target
    has it becomes a buffer that is not persistent: neither a parameter nor in the state dict, and never exported.
D12 A draft that ``learns_from_guesses`` trains a sample with guess places on these alone: a token at place k is the
    label of guess k of the round that began k tokens before it, and of no other. Optional: others ignore the places.
D13 What ``shard_hints`` says is true: on ranks that divide the module by it, and the vocabulary, a step differs from
    that of one rank by rounding only.
D14 ``weight_shapes``, where it is declared, names the trained parameters of ``build`` with their shapes.
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
    """The guesses of a proposer for the tokens after the last known one."""

    token_ids: tuple[int, ...]
    """K guesses in the target's vocabulary."""
    probs_KV: Tensor | None = None
    """float32 [K, V]: the distribution that each guess was drawn from; None for a deterministic proposal, whose
    distribution puts all mass on the guess."""


class Proposer(ABC):
    """The drafting state of one sequence during reference decoding."""

    @abstractmethod
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Take the target's states of T more positions, each with the token that *follows* it.

        The last of ``next_ids`` is the last known token: its own state does not exist yet.
        """

    @abstractmethod
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess the ``num_tokens`` tokens after the last known one, and forget them again.

        ``temperature`` 0 takes arg-maxima; else guesses are drawn from the draft's distribution at that
        temperature.
        """

    @classmethod
    def extend_all(
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Extend several proposers of one draft, each by its own. Optional: by default one after the other."""
        for proposer, ids, hidden_TNH in zip(proposers, next_ids, hidden, strict=True):
            proposer.extend(ids, hidden_TNH)

    @classmethod
    def propose_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return the guesses of several proposers of one draft, each drawn from its own generator.

        Optional: by default one after the other. A draft that computes them in one batch is faster.
        """
        return [
            proposer.propose(num_tokens, temperature, generator)
            for proposer, generator in zip(proposers, generators, strict=True)
        ]


class Draft(ABC):
    """A drafting algorithm; the module's docstring has the contract."""

    API_VERSIONS: ClassVar[range] = range(2, 3)
    """Versions of this interface that are accepted; newest first: 2, of the first release."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """The version that the plugin was written for."""
    Config: ClassVar[type[DraftConfig]] = DraftConfig
    small_run: ClassVar[Mapping[str, object]] = {}
    """Keys of section ``draft`` for a target of a few million parameters and minutes of training: what the quickstart
    sets."""
    serving_methods: ClassVar[Mapping[str, str]] = {}
    """Name of an engine plugin -> that engine's own name of the method that serves this draft's exports, such as the
    value of vLLM's ``speculative_config.method``. An engine that is not named does not serve them, unless it finds a
    method by itself. A draft whose options leave fewer engines sets its own in ``__init__``."""
    learns_from_guesses: ClassVar[bool] = False
    """Whether the loss is over the guesses that a target has judged, where a sample names them (D12)."""

    def __init__(self, config: DraftConfig) -> None:
        """Keep the validated section ``draft`` of the configuration."""
        self.config = config

    @classmethod
    def probe(cls) -> Availability:
        """Return whether the draft can be used here, and why not."""
        return Availability(ok=True)

    @classmethod
    def kernels(cls) -> type[KernelSet]:
        """Return the kernels that the draft can use; imports torch (D10)."""
        return KernelSet

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return the draft of an exported folder, or None if the folder is another algorithm's (D8).

        The draft has ``init_from`` set to the folder. Raises ArtifactError where the folder is this algorithm's
        but damaged.
        """

    @abstractmethod
    def check_target(self, target: TargetSpec) -> None:
        """Raise TargetError for a target that the draft cannot express (D2)."""

    def target_tensors(self, target: TargetSpec) -> Sequence[str]:
        """Return the names, in the target's folder, of further tensors of the target that the draft needs (D11)."""
        return ()

    def weight_shapes(self, target: TargetSpec) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each trained weight by name, without torch (D14).

        A run's memory is checked by it before it starts. Optional: by default empty, and the draft is not counted.
        """
        return {}

    @abstractmethod
    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the layers to capture, ascending, with their width and dtype."""

    @abstractmethod
    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return the loss's denominators, float64 [S] on the CPU, summed over the samples given (D6)."""

    @abstractmethod
    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        """Return the network with float32 parameters on the CPU (D3).

        ``token_counts``: int64 [V], how often each token is supervised in the training data; None counts as all
        equal. ``kernel``: gives kernels for the names that ``kernels`` declares. Initial weights
        are drawn from torch's global generator.
        """

    @abstractmethod
    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        """Return the fields of the exported config.json, in their order (D8)."""

    @abstractmethod
    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the exported tensors one by one, under the names and in the dtypes that engines load (D8).

        ``weights``: full tensors under the module's own state-dict names.
        """

    @abstractmethod
    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a fresh proposer for one sequence (D9)."""

    @property
    def max_draft_tokens(self) -> int | None:
        """The most guesses that one proposal of an exported draft can hold; None without a limit (D9)."""
        return None

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return which modules a strategy may shard as units of their own, and which it may divide."""
        return ShardHints()
