"""Strategy: how the trainer is parallel. It knows no drafting algorithm, only a module and its hints.

Contract (``spec_testing.StrategySuite`` quotes the numbers):

S1  ``step`` runs each micro-batch forward and backward once, *sums* gradients over data-parallel ranks (the
    module's losses are shares of a global loss), clips by the global norm, applies the optimizer.
S2  Parameters are kept and updated in float32 whatever the compute dtype. ``full_weights`` returns them as float32.
S3  The returned StepOutput is summed over micro-batches and data-parallel ranks: equal on every process.
S4  The number of ranks, and how a batch is cut among them, changes results only by rounding.
S5  ``save`` → ``load`` into a fresh strategy continues exactly: the next step gives the same bits. The state is
    the model (buffers too), the optimizer and each process's generator (``torch.get_rng_state``). A run may resume
    with another number of processes; a process without a saved generator keeps its own.
S6  No collective without a group of this strategy's own.
S7  ``data_parallel`` is a pure function of its arguments, the same before anything starts as in every process. Every
    data-parallel rank below the size has at least one process. All processes of one data-parallel rank receive the
    same samples, and ``step`` is called with the same micro-batches on each of them: a tensor-parallel group is one
    data-parallel rank. ``divisions`` lists configurations by which all processes are one such rank.
S8  ``read_weights`` returns the model of a saved state in one process, without any group: full CPU tensors, those
    that ``full_weights`` returned when it was saved.
S9  ``gather_weights`` yields the names and bits of ``full_weights``, in the same order on every process, and every
    process takes all of them: to gather one may be collective. A tensor is lent, and may be a live one: it is read
    before the next is asked for, on a device by work that is queued on its current stream by then.
S10 ``check`` refuses before anything starts what ``attach`` or ``vocabulary_ops`` could not do.
S11 ``Config.speed_only`` names the options that change no result but by rounding (S4). A run resumes with other
    values of these alone: a directory whose run had another value of any other option is refused before anything
    starts.
S12 ``attach`` builds the optimizer that it is given, whichever it is, over every trained weight, in one order on all
    processes. Its ``map_whole`` gives a function the whole weight, however that is divided over processes; the
    optimizer's state is saved and loaded with the model's, under the weight's name.
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
    """Settings of a training step that every strategy follows. The learning rate comes with each step."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the draft; master weights and optimizer are float32 in any case."""
    clip: PositiveFloat = 1.0
    """Largest global gradient norm."""


@dataclass(frozen=True)
class DataParallel:
    """A process's place on the data-parallel axis."""

    rank: int
    """Which share of each global batch the process trains."""
    size: int
    """Number of shares that a global batch is cut into."""


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Result of one optimizer step: summed outputs and the global gradient norm before clipping."""

    output: StepOutput
    grad_norm: Tensor


class Strategy(Resource):
    """Trains a module on every process of the trainer; the module's docstring holds the contract.

    The caller has initialised torch's default group among the trainer's processes.
    """

    API_VERSIONS: ClassVar[range] = range(2, 3)
    """Versions of this interface that are accepted; newest first: 2, of the first release."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """The version that the plugin was written for."""
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig

    def __init__(
        self, config: StrategyConfig, settings: StepConfig, optimizer: Optimizer, device: torch.device
    ) -> None:
        """Keep the section ``strategy``, the settings of a step, the optimizer's plugin and this process's device."""
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
        """Return the place of process ``rank`` of ``world_size``; by default each has a share of its own (S7).

        Raise ConfigError where the strategy cannot use ``world_size`` processes.
        """
        return DataParallel(rank, world_size)

    @classmethod
    def check(cls, config: StrategyConfig, target: TargetSpec, hints: ShardHints) -> None:
        """Raise ConfigError where a draft of these hints, or this target's vocabulary, cannot be divided (S10)."""

    @classmethod
    def divisions(cls, ranks: int) -> Sequence[StrategyConfig]:
        """Return the sections ``strategy`` that divide a draft over so many ranks (S7). Optional: by default none.

        ``spec_testing.DraftSuite`` takes a step of a draft by each that ``check`` accepts.
        """
        return ()

    @abstractmethod
    def attach(self, module: nn.Module, hints: ShardHints) -> None:
        """Take over the module, whose initial weights are the same on every rank, and build its optimizer."""

    @abstractmethod
    def vocabulary_ops(self, target: TargetSpec, tensors: TargetTensors) -> VocabularyOps:
        """Return the frozen half of the step, on this strategy's device, in its compute dtype; after ``attach``."""

    @abstractmethod
    def step(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps, lr: float
    ) -> TrainStep:
        """Train one optimizer step; every rank passes the same number of micro-batches (S1-S4)."""

    @abstractmethod
    def evaluate(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        """Return the output of a forward pass only, summed like a step's (S3)."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """Return the model's state, buffers too, as full CPU tensors under the module's names, on every rank (S2)."""

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's state one full tensor at a time, where it is (S9); by default all is gathered first."""
        yield from self.full_weights().items()

    @abstractmethod
    def save(self, folder: StateFolder) -> None:
        """Write this process's part of the state; every process calls, with the same folder (S5)."""

    @abstractmethod
    def load(self, folder: StateFolder) -> None:
        """Read what ``save`` wrote; every process calls. Raise ArtifactError where it is of another module (S5)."""

    @classmethod
    @abstractmethod
    def read_weights(cls, folder: StateFolder) -> dict[str, Tensor]:
        """Return the model of a saved state as full CPU tensors, in one process without any group (S8)."""

    def close(self) -> None:
        """Release what the strategy holds; idempotent."""
