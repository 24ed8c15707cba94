"""Define the strategy ``megatron``: tensor and data parallelism by Megatron-Core.

The draft's hints determine how it is divided.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, ClassVar

from spec_core import DataParallel, Strategy, StrategyConfig, TrainedWeight, TrainStep, to_device_async
from spec_core.errors import ArtifactError, ConfigError
from spec_core.records import Availability
from spec_kit.sharding import TensorParallelHints
from spec_strategy_megatron.config import MegatronConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from spec_core import StateFolder, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import DraftBatch, ShardHints, StepOutput
    from spec_kit.sharding import FlatShard
    from spec_strategy_megatron.held_weights import HeldWeights

logger = logging.getLogger(__name__)

_MODEL = "model."


class MegatronStrategy(Strategy):
    """Megatron-Core over a mesh of data × tensor ranks.

    The ranks of a tensor-parallel group have consecutive numbers. The module computes in the compute dtype. Gradients
    are summed, and masters updated, in float32.
    """

    name: ClassVar[str] = "megatron"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[StrategyConfig]] = MegatronConfig

    config: MegatronConfig
    _mesh: DeviceMesh
    _everyone: ProcessGroup
    _module: nn.Module
    _parallel: DistributedDataParallel
    _optimizer: MegatronOptimizer
    _hints: TensorParallelHints | None
    _held: HeldWeights
    _vocab_mask_V: Tensor | None

    @classmethod
    def probe(cls) -> Availability:
        """Return whether Megatron-Core is installed."""
        return Availability.of_distribution("megatron-core")

    @classmethod
    def data_parallel(cls, config: StrategyConfig, rank: int, world_size: int) -> DataParallel:
        """Return the data-parallel rank and size; consecutive ranks divide one draft (S7)."""
        assert isinstance(config, MegatronConfig)
        if world_size % config.tensor_parallel:
            raise ConfigError(
                f"strategy.tensor_parallel={config.tensor_parallel} does not divide train.ranks={world_size}; set "
                f"train.ranks to a multiple of {config.tensor_parallel}"
            )
        return DataParallel(rank // config.tensor_parallel, world_size // config.tensor_parallel)

    @classmethod
    def divisions(cls, ranks: int) -> Sequence[StrategyConfig]:
        """Return two configurations: tensor parallelism, without and with sequence parallelism (S7)."""
        divided = MegatronConfig(name=cls.name, tensor_parallel=ranks)
        return divided, divided.model_copy(update={"sequence_parallel": True})

    @classmethod
    def check(cls, config: StrategyConfig, target: TargetSpec, hints: ShardHints) -> None:
        """Raise ConfigError if heads, channels or a vocabulary cannot be divided evenly (S10)."""
        assert isinstance(config, MegatronConfig)
        parts = config.tensor_parallel
        divided = _hints_of(hints)
        if config.sequence_parallel and parts > 1 and not (divided and divided.each_token):
            raise ConfigError(
                "strategy.sequence_parallel=true needs a draft that says which of its modules work on each token by "
                "itself (TensorParallelHints.each_token), and this one does not; remove it"
            )
        if hints.undivided and parts > 1:
            raise ConfigError(
                f"strategy.tensor_parallel={parts}: {hints.undivided}, which cannot be divided; set it to 1, or "
                "strategy.name=fsdp"
            )
        if divided is None:
            return
        replicated = {name for name in divided.replicated if parts % divided.columns[name] == 0}
        pieces = {
            f"pieces (heads, channels or tokens) of the draft's {name}": number
            for name, number in {**divided.columns, **divided.rows}.items()
            if name not in replicated
        }
        if divided.vocab_mask:
            pieces["tokens of the draft's vocabulary"] = divided.vocab_size
        else:
            pieces["tokens of the target's vocabulary"] = target.vocab_size
        for name, number in divided.all_tokens_in.items() if config.sequence_parallel else ():
            pieces[f"tokens of a sequence in the draft's {name}"] = number
        for what, number in pieces.items():
            if number % parts:
                raise ConfigError(
                    f"strategy.tensor_parallel={parts} does not divide the {number} {what}; set it to a divisor "
                    f"of {number}"
                )

    def attach(self, module: nn.Module, hints: ShardHints) -> None:
        """Divide the module over the tensor axis, and build its optimizer."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from spec_kit.sharding import build_torch_optimizer

        with _quiet():
            from spec_strategy_megatron.divided_module import divide
            from spec_strategy_megatron.held_weights import HeldWeights
            from spec_strategy_megatron.megatron_parts import build_optimizer, data_parallel, masters_of

        world_size = dist.get_world_size()
        parts = self.config.tensor_parallel
        shape = (world_size // parts, parts)
        self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "tensor"))
        self._everyone = dist.new_group(list(range(world_size)))
        alone = [dist.new_group([rank]) for rank in range(world_size)][dist.get_rank()]
        self._hints = _hints_of(hints) if parts > 1 else None
        if parts > 1 and self._hints is None and dist.get_rank() == 0:
            logger.warning("the draft does not say how it may be divided: %d ranks compute the same", parts)
        tensor = self._mesh.get_group("tensor")
        divisions = (
            {} if self._hints is None else divide(module, self._hints, tensor, self.config.sequence_parallel)
        )
        self._module = module.to(self.device)
        vocab_mask_V = self._vocab_mask()
        self._vocab_mask_V = None if vocab_mask_V is None else vocab_mask_V.clone()
        trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
        wide = [value.detach() for value in trained.values()]
        for parameter in trained.values():
            parameter.data = parameter.data.to(getattr(torch, self.settings.dtype))
        # Megatron's distributed optimizer calls functions that torch 2.13 has renamed, and it warns about that.
        warnings.filterwarnings("ignore", r".*torch\.distributed\..*_tensor. is deprecated", FutureWarning)
        with _quiet(), self._megatron():
            self._parallel = data_parallel(module, self._mesh, alone, self.config.distributed_optimizer)
            self._optimizer = build_optimizer(self._parallel, self.settings, self._mesh, self._everyone)
        masters = masters_of(self._optimizer, list(trained.values()))
        for master, value in zip(masters, wide, strict=True):
            master.values.copy_(master.of(value))  # Megatron's values were rounded to the compute dtype
        self._held = HeldWeights(
            config=self.config,
            mesh=self._mesh,
            trained=trained,
            masters=dict(zip(trained, masters, strict=True)),
            divisions=divisions,
        )
        weights = self._weights(hints)
        self._optimizer.optimizer = build_torch_optimizer(self.optimizer, weights, self._map_whole)

    def _weights(self, hints: ShardHints) -> list[TrainedWeight]:
        return [
            TrainedWeight(
                name=name,
                values=master.tensor,
                shape=self._held.whole_shape(name),
                is_vocabulary=hints.is_vocabulary(name),
            )
            for name, master in self._held.masters.items()
        ]

    def vocabulary_ops(self, target: TargetSpec, tensors: TargetTensors) -> VocabularyOps:
        """Return operations on this rank's shard of the vocabulary, or on all of it if nothing is divided."""
        import torch

        from spec_kit.layers import TargetOps
        from spec_strategy_megatron.divided_ops import DividedTargetOps, vocabulary_bounds

        dtype = getattr(torch, self.settings.dtype)
        if self._hints is None:
            return TargetOps(target, tensors, self.device, dtype)
        bounds = vocabulary_bounds(self._vocab_mask_V, target.vocab_size, self.config.tensor_parallel)
        return DividedTargetOps(target, tensors, self.device, dtype, bounds, self._mesh.get_group("tensor"))

    def step(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps, lr: float
    ) -> TrainStep:
        """Run one optimizer step (S1-S4).

        Gradients are summed over the data axis during the last backward pass.
        """
        import torch

        denominators = to_device_async(denominators, self.device)
        outputs: list[StepOutput] = []
        for batch in micro_batches[:-1]:
            with self._parallel.no_sync():
                outputs.append(self._forward_backward(batch, denominators, ops))
        outputs.append(self._forward_backward(micro_batches[-1], denominators, ops))
        self._parallel.finish_grad_sync()
        self._sum_partial_gradients()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with self._megatron():
            _, grad_norm, _ = self._optimizer.step()
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()
        return TrainStep(output=self._sum_over_ranks(outputs), grad_norm=torch.tensor(grad_norm))

    def evaluate(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        """Return the output of forward passes without backward passes, summed over the data axis."""
        import torch

        denominators = to_device_async(denominators, self.device)
        with torch.no_grad():
            return self._sum_over_ranks(
                [self._forward(self._module, batch, denominators, ops) for batch in micro_batches]
            )

    def full_weights(self) -> dict[str, Tensor]:
        """Return the full float32 weights and the buffers, on the CPU (S2)."""
        return {name: tensor.cpu() for name, tensor in self.gather_weights()}

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors one after the other, each on every process's device (S9)."""
        for name, value in self._module.state_dict().items():
            part = self._held.part(name) if name in self._held.masters else value.detach()
            yield name, self._held.whole(name, part)

    def save(self, folder: StateFolder) -> None:
        """Write this process's shards, and on rank 0 their index; strategy ``fsdp`` can read these files (S5)."""
        from spec_kit.sharding import save_sharded

        save_sharded(self._state(), folder, self._everyone)

    def load(self, folder: StateFolder) -> None:
        """Read the shards of a checkpoint that any number of processes wrote (S5)."""
        from spec_kit.sharding import load_sharded

        load_sharded(self._state(), folder, self._everyone)
        vocab_mask_V = self._vocab_mask()
        if (
            self._vocab_mask_V is not None
            and vocab_mask_V is not None
            and not vocab_mask_V.equal(self._vocab_mask_V)
        ):
            raise ArtifactError(f"{folder.path} is of another vocabulary of the draft than this run's")
        for name, parameter in self._held.trained.items():
            master = self._held.masters[name]
            master.of(parameter).copy_(master.values)
        if self.config.distributed_optimizer:
            with self._megatron():
                self._parallel.start_param_sync()

    @classmethod
    def read_weights(cls, folder: StateFolder) -> dict[str, Tensor]:
        """Return the full weights of a saved state, joined from its shards (S8)."""
        from spec_kit.sharding import read_full

        return read_full(folder, _MODEL)

    def _vocab_mask(self) -> Tensor | None:
        """Return the bool buffer of a reduced vocabulary if ranks divide the vocabulary by it, or None."""
        return (
            self._module.get_buffer(self._hints.vocab_mask)
            if self._hints and self._hints.vocab_mask
            else None
        )

    def _forward_backward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        from spec_strategy_megatron.stand_in import as_current_device

        output = self._forward(self._parallel, batch, denominators, ops)
        with as_current_device(self.device):
            output.loss.backward()
        return output.detached()

    def _forward(
        self, module: nn.Module, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        from spec_strategy_megatron.divided_tokens import pad_tokens
        from spec_strategy_megatron.stand_in import as_current_device

        if self._divides_tokens:
            batch = pad_tokens(batch, self.config.tensor_parallel)
        with as_current_device(self.device):
            return module(batch, denominators, ops)

    @property
    def _divides_tokens(self) -> bool:
        return self._hints is not None and self.config.sequence_parallel

    def _sum_partial_gradients(self) -> None:
        """Sum over the tensor axis the gradients that each rank has computed only in part."""
        import torch
        import torch.distributed as dist

        hints = self._hints
        names = (*hints.partial, *(hints.each_token if self._divides_tokens else ())) if hints else ()
        modules = [self._module.get_submodule(name) for name in names]
        shared = [(parameter, 1, 0) for module in modules for parameter in module.parameters()]
        parts = self.config.tensor_parallel
        rank = self._mesh.get_local_rank("tensor")
        shared += [
            (self._held.trained[name], parts // division.copies, rank // division.copies)
            for name, division in self._held.divisions.items()
            if division.copies > 1
        ]
        if not shared:
            return
        # A replicated weight has one place for each distinct shard; each rank adds to the place of its own shard.
        sums = [parameter.main_grad.new_zeros(number, parameter.numel()) for parameter, number, _ in shared]
        for (parameter, _, index), total in zip(shared, sums, strict=True):
            total[index] = parameter.main_grad.flatten()
        flat = torch.cat([total.flatten() for total in sums])
        dist.all_reduce(flat, group=self._mesh.get_group("tensor"))
        totals = flat.split([total.numel() for total in sums])
        for (parameter, number, index), total in zip(shared, totals, strict=True):
            parameter.main_grad.copy_(total.view(number, *parameter.shape)[index])

    def _map_whole(
        self, function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Apply ``function`` to each full tensor, and return this rank's shard of each result (S12).

        All ranks divide the tensors among themselves. ``parts``: weight name → this rank's shard of the
        tensor.
        """
        from spec_kit.sharding import Parts, map_dealt

        held = Parts(gather=self._held.gather, cut=self._held.cut, group=self._everyone)
        return map_dealt(function, parts, held)

    def _state(self) -> dict[str, Tensor | FlatShard]:
        """Return a checkpoint's tensors: master weights, other tensors of the module, and optimizer state."""
        masters = self._held.masters
        state: dict[str, Tensor | FlatShard] = {
            f"{_MODEL}{name}": value
            for name, value in self._module.state_dict().items()
            if name not in masters
        }
        for name, master in masters.items():
            state[f"{_MODEL}{name}"] = self._held.shard(name, master.values)
            for key, value in self._optimizer.state[master.tensor].items():
                state[f"optimizer.{name}.{key}"] = self._held.shard(name, value)
        return state

    def _sum_over_ranks(self, outputs: Sequence[StepOutput]) -> StepOutput:
        """Return the outputs, summed over micro-batches and the data axis."""
        from spec_kit.sharding import ordered_sum

        return reduce(add, outputs).combined(partial(ordered_sum, group=self._mesh.get_group("data")))

    def _megatron(self) -> AbstractContextManager[None]:
        from spec_strategy_megatron.stand_in import on_device

        return on_device(self.device)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress Megatron's warnings about missing Transformer Engine and Apex, which are not used here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


def _hints_of(hints: ShardHints) -> TensorParallelHints | None:
    """Return the hints in the terms that this strategy knows, or None if the draft has none in them."""
    own = hints.tensor_parallel
    return own if isinstance(own, TensorParallelHints) else None
