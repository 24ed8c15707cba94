"""Define the strategy ``fsdp``: FSDP2 over all ranks, or over each of several groups of ranks (HSDP).

Neighbouring ranks may divide samples (context parallelism). Float32 shards are the master weights for any compute
dtype.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core import (
    DataParallel,
    ShardCounts,
    Strategy,
    StrategyConfig,
    TrainedWeight,
    TrainStep,
    to_device_async,
)
from spec_core.errors import ConfigError
from spec_strategy_fsdp.config import FsdpConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from spec_core import ContextGroup, StateFolder, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import DraftBatch, ShardHints, StepOutput
    from spec_strategy_fsdp.sharded_module import ShardedModule
    from spec_strategy_fsdp.whole_module import WholeModule

_MODEL = "model."


class FsdpStrategy(Strategy):
    """FSDP2 over all trainer processes, or over the processes of each replica of the draft.

    Parameters are stored as float32 shards. FSDP2 casts them to the compute dtype when it gathers them, and reduces
    and accumulates gradients in float32. A single process does the same without FSDP2 (``WholeModule``).
    """

    name: ClassVar[str] = "fsdp"
    api_version: ClassVar[int] = 1
    takes_fp8: ClassVar[bool] = True
    Config: ClassVar[type[StrategyConfig]] = FsdpConfig

    config: FsdpConfig
    _everyone: ProcessGroup
    _context: ContextGroup | None
    _module: ShardedModule | WholeModule
    _optimizer: torch.optim.Optimizer

    @classmethod
    def data_parallel(cls, config: StrategyConfig, rank: int, world_size: int) -> DataParallel:
        """Return the data-parallel rank and size; consecutive ranks divide the tokens of a sample (S7)."""
        assert isinstance(config, FsdpConfig)
        for option in ("replicate", "context_parallel"):
            if world_size % (parts := getattr(config, option)):
                raise ConfigError(
                    f"strategy.{option}={parts} does not divide train.ranks={world_size}; set train.ranks to a "
                    f"multiple of {parts}"
                )
        return DataParallel(rank // config.context_parallel, world_size // config.context_parallel)

    @classmethod
    def divisions(cls, ranks: int) -> Sequence[StrategyConfig]:
        """Return one configuration: context parallelism over ``ranks`` processes (S7)."""
        return (FsdpConfig(name=cls.name, context_parallel=ranks),)

    @classmethod
    def check(cls, config: StrategyConfig, target: TargetSpec, hints: ShardHints) -> None:
        """Raise ConfigError if context parallelism is on and the draft does not support it (S10)."""
        assert isinstance(config, FsdpConfig)
        if config.context_parallel > 1 and not hints.context_parallel:
            raise ConfigError(
                f"strategy.context_parallel={config.context_parallel} needs a draft whose ranks can divide a sample "
                "(ShardHints.context_parallel), and this one's cannot; remove it"
            )

    @classmethod
    def shard_counts(cls, config: StrategyConfig, world_size: int) -> ShardCounts:
        """Return the numbers of shards: a replica's ranks divide the weights, and the vocabulary is undivided."""
        assert isinstance(config, FsdpConfig)
        return ShardCounts(weights=world_size // config.replicate, vocabulary=1)

    def attach(self, module: nn.Module, hints: ShardHints) -> None:
        """Shard the module over the processes of a replica and build its optimizer."""
        import torch
        import torch.distributed as dist

        from spec_kit.sharding import build_torch_optimizer
        from spec_strategy_fsdp.sharded_module import ShardedModule
        from spec_strategy_fsdp.whole_module import WholeModule

        everyone = dist.group.WORLD
        assert everyone is not None
        world_size = dist.get_world_size()
        dtype = getattr(torch, self.settings.dtype)
        self._everyone = everyone
        self._context = self._context_group(world_size)
        module.to(self.device)
        if world_size == 1:
            self._module = WholeModule(module, dtype)
        else:
            self._module = ShardedModule(module, hints, self.config.replicate, dtype)
        weights = [
            TrainedWeight(
                name=name, values=value, shape=tuple(value.shape), is_vocabulary=hints.is_vocabulary(name)
            )
            for name, value in self._module.trained.items()
        ]
        self._optimizer = build_torch_optimizer(self.optimizer, weights, self._map_whole)

    def vocabulary_ops(self, target: TargetSpec, tensors: TargetTensors) -> VocabularyOps:
        """Return vocabulary operations that hold the whole vocabulary on every process."""
        import torch

        from spec_kit.layers import TargetOps

        return TargetOps(target, tensors, self.device, getattr(torch, self.settings.dtype))

    def step(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps, lr: float
    ) -> TrainStep:
        """Run one optimizer step; gradients are summed over ranks once, at the end of the step (S1-S4)."""
        import torch

        denominators = to_device_async(denominators, self.device)
        outputs: list[StepOutput] = []
        self._module.begin()
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            output = self._module.forward(self._divided(batch), denominators, ops, reduces=is_last)
            # In this thread, because another thread would have to take the GIL for each function in Python.
            with torch.autograd.set_multithreading_enabled(False):
                output.loss.backward()
            self._module.end_pass()
            outputs.append(output.detached())
        grad_norm = torch.nn.utils.clip_grad_norm_(self._module.trained.values(), self.settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return TrainStep(output=self._sum_over_ranks(outputs), grad_norm=_full(grad_norm))

    def evaluate(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        """Return the output of forward passes without backward passes, summed over processes."""
        import torch

        denominators = to_device_async(denominators, self.device)
        self._module.begin()
        with torch.no_grad():
            outputs = [
                self._module.forward(self._divided(batch), denominators, ops) for batch in micro_batches
            ]
        self._module.end_evaluation()
        return self._sum_over_ranks(outputs)

    def full_weights(self) -> dict[str, Tensor]:
        """Return the full float32 weights and the buffers, on the CPU (S2)."""
        return {name: tensor.cpu() for name, tensor in self.gather_weights()}

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors one after the other, each on every process's device (S9)."""
        for name, value in self._module.state_dict().items():
            yield name, _full(value).detach()

    def save(self, folder: StateFolder) -> None:
        """Write this process's shards, and on rank 0 their index (S5)."""
        from spec_kit.sharding import save_sharded

        save_sharded(self._state(), folder, self._everyone)

    def load(self, folder: StateFolder) -> None:
        """Read the shards of a checkpoint that any number of processes wrote (S5)."""
        from spec_kit.sharding import load_sharded

        load_sharded(self._state(), folder, self._everyone)

    @classmethod
    def read_weights(cls, folder: StateFolder) -> dict[str, Tensor]:
        """Return the full weights of a saved state, joined from its shards (S8)."""
        from spec_kit.sharding import read_full

        return read_full(folder, _MODEL)

    def _context_group(self, world_size: int) -> ContextGroup | None:
        """Return the group of ranks that divide samples with this process; None without division. Collective."""
        import torch.distributed as dist

        from spec_strategy_fsdp.context_ranks import ContextRanks

        size = self.config.context_parallel
        if size == 1:
            return None
        groups = [_new_group(range(first, first + size)) for first in range(0, world_size, size)]
        return ContextRanks(groups[dist.get_rank() // size])

    def _divided(self, batch: DraftBatch) -> DraftBatch:
        return batch if self._context is None else replace(batch, context=self._context)

    def _state(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors: the model's tensors, and the optimizer's tensors for each parameter."""
        model = {f"{_MODEL}{name}": value for name, value in self._module.state_dict().items()}
        optimizer = {
            f"optimizer.{name}.{key}": value
            for name, parameter in self._module.trained.items()
            for key, value in self._optimizer.state[parameter].items()
        }
        return model | optimizer

    def _map_whole(
        self, function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Apply ``function`` to each full tensor, and return this rank's shard of each result (S12).

        The ranks of all replicas divide the tensors among themselves. ``parts``: weight name → this rank's
        shard.
        """
        from spec_kit.sharding import Parts, map_dealt

        if self._module.is_whole:
            return {name: function(part) for name, part in parts.items()}
        held = Parts(gather=lambda _, part: _full(part), cut=self._module.cut, group=self._everyone)
        return map_dealt(function, parts, held)

    def _sum_over_ranks(self, outputs: Sequence[StepOutput]) -> StepOutput:
        from spec_kit.sharding import ordered_sum

        total = reduce(add, outputs)
        return total if self._module.is_whole else total.combined(partial(ordered_sum, group=self._everyone))


def _new_group(ranks: range) -> ProcessGroup:
    """Return a new process group of ``ranks``. Every process must call this, also outside the group."""
    import torch.distributed as dist

    group: Any = dist.new_group(list(ranks))  # not a group if this process is not a member
    return group


def _full(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value
