"""A Strategy trains a module in parallel, on all processes of the trainer.

It gets the module and its ShardHints, and does not depend on the drafting algorithm.

Contract (``spec_testing.StrategySuite`` quotes the numbers):

S1  ``step`` runs each micro-batch forward and backward once, *sums* gradients over data-parallel ranks (the
    module's losses are shares of a global loss), clips them by the global norm, and applies the optimizer.
S2  Parameters are kept and updated in float32 whatever the compute dtype. ``full_weights`` returns them as float32.
S3  The returned StepOutput is summed over micro-batches and data-parallel ranks: equal on every process.
S4  The number of ranks, and how a batch is cut among them, changes results only by rounding.
S5  ``save`` → ``load`` into a fresh strategy continues exactly: the next step gives the same bits. The state is the
    model (buffers too), the optimizer and each process's generator (``torch.get_rng_state``). A run may resume with
    another number of processes; a process without a saved generator keeps its own.
S6  Every collective names a process group of this strategy, never torch's default group.
S7  ``data_parallel`` is a pure function of its arguments: it gives the same result in every process, also before
    the run starts. Every data-parallel rank below the size has at least one process. All processes of one
    data-parallel rank receive the same samples, and ``step`` is called with the same micro-batches on each of them:
    a tensor-parallel group is one data-parallel rank. ``divisions`` returns configurations in which all processes
    are one data-parallel rank.
S8  ``read_weights`` returns the model of a saved state in one process, without any group: the full CPU tensors that
    ``full_weights`` returned when the state was saved.
S9  ``gather_weights`` yields the names and bits of ``full_weights``, in the same order on every process. Every
    process must take all tensors, because gathering a tensor may be collective. A tensor may be the live weight
    itself, and is valid until the next tensor is requested: work that reads it on a device must be queued on the
    device's current stream before.
S10 ``check`` raises, before anything starts, if ``attach`` or ``vocabulary_ops`` would fail.
S11 ``Config.speed_only`` names the options that change results by rounding only (S4). A run may be resumed with
    other values of these options. If any other option has changed, the run is refused before anything starts.
S12 ``attach`` builds the given optimizer, whichever it is, for every trained weight, in the same order on all
    processes. Its ``map_whole`` applies a function to the whole weight, however the weight is divided over
    processes. The optimizer's state is saved and loaded with the model's state, under the weight's name.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat

from spec_core.config import Config, StrategyConfig
from spec_core.records import Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor, nn

    from spec_core.ops import VocabularyOps
    from spec_core.optimizer import Optimizer
    from spec_core.records import DraftBatch, ShardHints, StepOutput
    from spec_core.state_folder import StateFolder
    from spec_core.target import TargetSpec, TargetTensors


class StepConfig(Config):
    """Settings of a training step for every strategy. The learning rate is an argument of each step."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the draft; master weights and optimizer are float32 in any case."""
    clip: PositiveFloat = 1.0
    """Largest global gradient norm."""


@dataclass(frozen=True)
class DataParallel:
    """The data-parallel rank of a process, and the number of data-parallel ranks."""

    rank: int
    """Index of the share of each global batch on which the process trains."""
    size: int
    """Number of shares that a global batch is divided into."""


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """The numbers of shards into which a strategy divides the draft's weights and the target's vocabulary."""

    weights: int
    """Processes that divide one copy of the draft's weights, gradients and optimizer state."""
    vocabulary: int
    """Processes that divide the target's embedding and head."""


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The result of one optimizer step: summed outputs, and the global gradient norm before clipping."""

    output: StepOutput
    grad_norm: Tensor


class Strategy(Resource):
    """Trains a module on every process of the trainer; the module's docstring holds the contract.

    The caller has initialised torch's default group among the trainer's processes.
    """

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    takes_fp8: ClassVar[bool] = False
    """Whether the matrix products of the draft and of the vocabulary operations may be in fp8. This requires that
    each process has full weights during its forward and backward passes."""

    def __init__(
        self, config: StrategyConfig, settings: StepConfig, optimizer: Optimizer, device: torch.device
    ) -> None:
        """Store the section ``strategy``, the step settings, the optimizer plugin and this process's device."""
        self.config = config
        self.settings = settings
        self.optimizer = optimizer
        self.device = device

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the strategy; never raises."""
        return Availability(ok=True)

    @classmethod
    def data_parallel(cls, config: StrategyConfig, rank: int, world_size: int) -> DataParallel:
        """Return the data-parallel rank and size of process ``rank`` of ``world_size`` (S7).

        By default each process is a data-parallel rank. Raise ConfigError if the strategy cannot use
        ``world_size`` processes.
        """
        return DataParallel(rank, world_size)

    @classmethod
    def shard_counts(cls, config: StrategyConfig, world_size: int) -> ShardCounts:
        """Return the numbers of shards of weights and of vocabulary, from which a run's memory is computed.

        Optional: by default all processes divide the weights, and the processes of one data-parallel rank divide
        the vocabulary.
        """
        shares = cls.data_parallel(config, 0, world_size).size
        return ShardCounts(weights=world_size, vocabulary=world_size // shares)

    @classmethod
    def check(cls, config: StrategyConfig, target: TargetSpec, hints: ShardHints) -> None:
        """Raise ConfigError if a draft with these hints, or the target's vocabulary, cannot be divided (S10)."""

    @classmethod
    def divisions(cls, ranks: int) -> Sequence[StrategyConfig]:
        """Return configurations by which ``ranks`` processes divide one draft (S7).

        Optional: by default none.

        ``spec_testing.DraftSuite`` trains a step with each configuration that ``check`` accepts.
        """
        return ()

    @abstractmethod
    def attach(self, module: nn.Module, hints: ShardHints) -> None:
        """Shard the module, whose initial weights are equal on every rank, and build its optimizer.

        Call it once.
        """

    @abstractmethod
    def vocabulary_ops(self, target: TargetSpec, tensors: TargetTensors) -> VocabularyOps:
        """Return the target's embedding, norm and head for training steps; call it after ``attach``.

        They are on the strategy's device, in its compute dtype.
        """

    @abstractmethod
    def step(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps, lr: float
    ) -> TrainStep:
        """Train one optimizer step. Every rank passes the same number of micro-batches (S1-S4)."""

    @abstractmethod
    def evaluate(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        """Run the forward pass only, and return the output summed over micro-batches and ranks (S3)."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """Return name -> full CPU tensor for all parameters and buffers of the module, on every rank (S2)."""

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of each parameter and buffer, without a copy to the CPU (S9).

        By default all tensors are gathered first.
        """
        yield from self.full_weights().items()

    @abstractmethod
    def save(self, folder: StateFolder) -> None:
        """Write this process's shard of the state. Every process calls it with the same folder (S5)."""

    @abstractmethod
    def load(self, folder: StateFolder) -> None:
        """Read the state that ``save`` wrote, on every process.

        Raise ArtifactError if it is the state of another module (S5).
        """

    @classmethod
    @abstractmethod
    def read_weights(cls, folder: StateFolder) -> dict[str, Tensor]:
        """Return the parameters and buffers of a saved state as full CPU tensors; one process suffices (S8)."""

    def close(self) -> None:
        """Release what the strategy holds; idempotent."""
