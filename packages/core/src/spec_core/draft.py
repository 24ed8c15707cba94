"""A Draft plugin implements a drafting algorithm, in code for a single device.

Contract (``spec_testing.DraftSuite`` quotes the numbers):

D1  The class imports without torch; ``Config`` derives from DraftConfig. The plugin's code has no optimizer, no
    collective and no device string.
D2  ``check_target`` raises TargetError for a target that the draft cannot express (too few layers, a biased
    head, another norm). The draft expresses an accepted target exactly. ``required_features`` is called for
    accepted targets only.
D3  ``build`` returns a module. Its parameters are exactly the trained weights, and its persistent buffers (the
    vocabulary mapping) are checkpoint state. With ``config.init_from`` both come from that folder.
D4  The module's ``forward(batch, denominators, ops) -> StepOutput`` touches every parameter, also for a batch
    without a supervised token, and is called once per micro-batch.
D5  Losses add up: the loss and gradients of a global batch do not depend on how it is cut into micro-batches,
    packed or padded. A denominator of 0 gives loss 0 and zero gradients on every parameter.
D6  ``denominators`` needs no model. The global batch's denominators are sums over its samples, so they do not
    depend on the number of ranks.
D7  Metrics are ratios of sums; ``acceptance_length`` is one of them, ``accuracy`` (per draft position) another.
D8  ``exported_config`` and ``exported_tensors`` define a folder that the engines in ``serving_methods`` load.
    ``from_folder`` recognises this folder, and the draft that it returns builds the same weights, bit for bit in the
    stored dtype.
D9  ``proposer`` drafts exactly as the engines do: its proposals equal the guesses of the module's forward pass.
    ``max_draft_tokens`` is the largest number of guesses in one proposal; None if there is no limit.
    ``default_draft_tokens`` is the number of guesses with which an exported draft is served at first.
    ``extend_all`` and ``propose_all`` do for several sequences what ``extend`` and ``propose`` do for one.
D10 ``kernels`` declares every kernel that the module may use, with an example for each that has a plain version.
    A step with a backend's kernels differs from a step without them by rounding only.
D11 ``target_tensors`` names every tensor that ``build`` takes from ``TargetTensors.others``. A tensor that stays
    unchanged becomes a non-persistent buffer: neither a parameter nor in the state dict, and never exported.
D12 If a sample has guess depths (``Generation.guess_depths``), a draft that ``learns_from_guesses`` trains on guessed
    tokens only. A token of guess depth k is the label of guess k of the round that began k tokens before it,
    and of no other guess. Optional: other drafts ignore guess depths.
D13 A step of several ranks differs from the step of one rank by rounding only, if the ranks divide the module by
    ``shard_hints``, the vocabulary or (optional) the tokens of a batch that has a ``context``.
D14 ``DraftCost.weight_shapes``, if it is declared, names the trained parameters of ``build`` with their shapes.
D15 ``DraftCost.sample_flops`` returns positive integers, the same in every process. A longer sample with equally many
    supervised tokens costs no less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from spec_core.config import DraftConfig
from spec_core.errors import TargetError
from spec_core.kernels import FindKernel, KernelSet, no_kernel
from spec_core.records import Availability, ShardHints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """float32 [K, V]: the distribution that each guess was drawn from; None for a deterministic proposal,
    whose distribution puts all mass on the guess."""


class Proposer(ABC):
    """Drafts tokens for one sequence during reference decoding, and holds the sequence's drafting state."""

    @abstractmethod
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Append the target's hidden states of T more positions, each with the id of the token *after* it.

        The last id of ``next_ids`` is the last known token, whose hidden state does not exist yet.
        """

    @abstractmethod
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess the ``num_tokens`` tokens after the last known token.

        The guesses do not change the drafting state.

        At ``temperature`` 0 each guess is the arg-max. Otherwise guesses are drawn from the draft's
        distribution at that temperature.
        """

    @classmethod
    def extend_all(
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Call ``extend`` on several proposers of one draft, each with its own arguments.

        Optional: by default ``extend`` is called on one proposer after the other.
        """
        for proposer, ids, hidden_TNH in zip(proposers, next_ids, hidden, strict=True):
            proposer.extend(ids, hidden_TNH)

    @classmethod
    def propose_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return the guesses of several proposers of one draft; each proposer draws from its own generator.

        Optional: by default ``propose`` is called on one proposer after the other. One batch for all is faster.
        """
        return [
            proposer.propose(num_tokens, temperature, generator)
            for proposer, generator in zip(proposers, generators, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """The costs of training a draft for a target. Every field is optional; what is not declared is not counted."""

    weight_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    """Shape of each trained weight by name. A run checks its memory by them before it starts."""
    sample_flops: Callable[[int, int], int] = lambda num_tokens, _num_supervised: num_tokens
    """FLOPs of a step on one sample, from its number of tokens and of supervised tokens. A run balances them over
    ranks and micro-batches, and ``plan`` derives the least time of a run from them."""
    saved_values: Callable[[int, int], int] = lambda _num_tokens, _num_supervised: 0
    """Least number of values that a forward pass on one sample saves for the backward pass, from the same numbers.
    ``plan`` warns of forward passes that need too much memory, and a run divides its steps by it."""


class Draft(ABC):
    """A drafting algorithm; the module's docstring has the contract."""

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[DraftConfig]] = DraftConfig
    small_run: ClassVar[Mapping[str, object]] = {}
    """Options of section ``draft`` that suit a target with a few million parameters and a training of minutes. The
    quickstart sets them."""
    serving_methods: ClassVar[Mapping[str, str]] = {}
    """Engine plugin -> the engine's name for the speculative method that serves exports of this draft, such
    as the value of vLLM's ``speculative_config.method``. An engine that is not named cannot serve the
    exports, unless it finds a method by itself. A draft with options that exclude an engine sets this in
    ``__init__``."""
    learns_from_guesses: ClassVar[bool] = False
    """Whether the loss is computed on the guesses that the target has verified, if a sample records them
    (D12)."""

    def __init__(self, config: DraftConfig) -> None:
        """Store the validated configuration section ``draft``."""
        self.config = config

    @classmethod
    def probe(cls) -> Availability:
        """Return whether the draft can be used here, and why not."""
        return Availability(ok=True)

    @classmethod
    def kernels(cls) -> type[KernelSet]:
        """Return the KernelSet of the kernels that the draft can use; imports torch (D10)."""
        return KernelSet

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return the draft of an exported folder, or None if another algorithm has exported it (D8).

        The draft has ``init_from`` set to the folder. Raise ArtifactError if the folder is an export of this
        algorithm but damaged.
        """

    @abstractmethod
    def check_target(self, target: TargetSpec) -> None:
        """Raise TargetError for a target that the draft cannot express (D2)."""

    def target_tensors(self, target: TargetSpec) -> Sequence[str]:
        """Return the names of further tensors that the draft needs from the target's safetensors files (D11)."""
        return ()

    def cost(self, target: TargetSpec) -> DraftCost:
        """Return the costs of training the draft for ``target``, without importing torch (D14, D15). Optional."""
        return DraftCost()

    @abstractmethod
    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the ids of the target layers to capture, ascending, with their width and dtype."""

    @abstractmethod
    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return the denominators of the loss, float64 [S] on the CPU (D6).

        Each is a sum over the samples whose ``supervision`` is given. S is the number of the draft's
        denominators, for example one for each step of training-time test.
        """

    @abstractmethod
    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        """Return the network with float32 parameters on the CPU (D3).

        ``token_counts``: int64 [V], how often each token is supervised in the training data; None means equal
        counts. ``kernel``: returns the kernel of a name that ``kernels`` declares. Initial weights are drawn
        from torch's global generator.
        """

    @abstractmethod
    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        """Return the fields of the exported config.json, in the order in which they are written (D8)."""

    @abstractmethod
    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the exported tensors one by one, under the names and in the dtypes that engines load (D8).

        ``weights``: full tensors under the module's own state-dict names.
        """

    @classmethod
    def write_into_target(cls, target: TargetSpec, folder: Path, output: Path) -> None:
        """Write to ``output`` a copy of the target whose own draft is replaced by the export in ``folder``.

        ``from_folder`` recognises the copy. Optional, for drafts that targets ship with: by default raise
        TargetError.
        """
        raise TargetError(
            f"targets ship with no {cls.name} draft that could be replaced; export the draft alone"
        )

    @abstractmethod
    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a fresh proposer for one sequence (D9)."""

    @property
    def max_draft_tokens(self) -> int | None:
        """The largest number of guesses in one proposal of an exported draft; None if there is no limit (D9)."""
        return None

    @property
    def default_draft_tokens(self) -> int:
        """The number of guesses of a round, if the user names none (D9).

        Optional: by default ``max_draft_tokens``, or 4 if there is no limit, because each guess of a chain costs a
        pass of the draft.
        """
        return 4 if self.max_draft_tokens is None else self.max_draft_tokens

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return which modules a strategy may shard as units, and how tensor-parallel ranks may divide them."""
        return ShardHints()
