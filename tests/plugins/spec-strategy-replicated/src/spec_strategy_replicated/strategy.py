"""Strategy ``replicated``: every process holds the whole draft; gradients are summed in buckets.

Several processes can train each share and compare what they computed: a device that computes wrongly ends the run
instead of spoiling the draft.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveInt

from spec_core import (
    DataParallel,
    Strategy,
    StrategyConfig,
    TrainedWeight,
    TrainStep,
    map_here,
    to_device_async,
)
from spec_core.errors import ArtifactError, ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from spec_core import StateFolder, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import DraftBatch, ShardHints, StepOutput

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"


class ReplicatedConfig(StrategyConfig):
    """Section ``strategy`` of a run that names this strategy."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"bucket_mib", "copies"})

    bucket_mib: PositiveInt = 25
    """MiB of gradients that one collective sums."""
    copies: PositiveInt = 1
    """Processes that train each share of a batch; they compare their results after every step."""


class ReplicatedStrategy(Strategy):
    name: ClassVar[str] = "replicated"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[StrategyConfig]] = ReplicatedConfig

    config: ReplicatedConfig

    @classmethod
    def data_parallel(cls, config: StrategyConfig, rank: int, world_size: int) -> DataParallel:
        assert isinstance(config, ReplicatedConfig)
        if world_size % config.copies:
            raise ConfigError(
                f"strategy.copies={config.copies} does not divide train.ranks={world_size}; set train.ranks to a "
                f"multiple of {config.copies}"
            )
        return DataParallel(rank // config.copies, world_size // config.copies)

    def attach(self, module: nn.Module, hints: ShardHints) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        shape = (dist.get_world_size() // self.config.copies, self.config.copies)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("shares", "copies"))
        self._shares, self._copies = mesh.get_group("shares"), mesh.get_group("copies")
        module.to(self.device)
        trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._masters = {name: value.detach().float().clone() for name, value in trained.items()}
        self._module = module.to(getattr(torch, self.settings.dtype))
        weights = [
            TrainedWeight(
                name=name, values=master, shape=tuple(master.shape), is_vocabulary=hints.is_vocabulary(name)
            )
            for name, master in self._masters.items()
        ]
        self._optimizer = self.optimizer.build(weights, map_here)
        self._put_back()

    def vocabulary_ops(self, target: TargetSpec, tensors: TargetTensors) -> VocabularyOps:
        import torch

        from spec_kit.layers import TargetOps

        return TargetOps(target, tensors, self.device, getattr(torch, self.settings.dtype))

    def step(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps, lr: float
    ) -> TrainStep:
        import torch

        denominators = to_device_async(denominators, self.device)
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        outputs: list[StepOutput] = []
        for batch in micro_batches:
            output: StepOutput = self._module(batch, denominators, ops)
            output.loss.backward()
            self._collect_gradients()
            outputs.append(output.detached())
        self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self.settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._put_back()
        summed = self._sum_outputs(outputs)
        self._compare(torch.stack([summed.loss, norm.double()]))
        return TrainStep(output=summed, grad_norm=norm)

    def evaluate(
        self, micro_batches: Sequence[DraftBatch], denominators: Tensor, ops: VocabularyOps
    ) -> StepOutput:
        import torch

        denominators = to_device_async(denominators, self.device)
        with torch.no_grad():
            return self._sum_outputs([self._module(batch, denominators, ops) for batch in micro_batches])

    def full_weights(self) -> dict[str, Tensor]:
        state = self._module.state_dict()
        return {name: self._masters.get(name, value).detach().cpu() for name, value in state.items()}

    def save(self, folder: StateFolder) -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            folder.write_tensors(MODEL_FILE, self.full_weights())
            folder.write_tensors(OPTIMIZER_FILE, self._optimizer_state())
        folder.write_tensors(_generator_file(dist.get_rank()), {"state": torch.get_rng_state()})

    def load(self, folder: StateFolder) -> None:
        import torch
        import torch.distributed as dist

        weights = folder.read_tensors(MODEL_FILE)
        different = weights.keys() ^ self._module.state_dict().keys()
        if different:
            raise ArtifactError(f"checkpoint and draft differ in {', '.join(sorted(different))}")
        self._module.load_state_dict(weights)
        for name, master in self._masters.items():
            master.copy_(weights[name])
        state = self._optimizer_state()
        for name, value in folder.read_tensors(OPTIMIZER_FILE).items():
            state[name].copy_(value)
        generator = _generator_file(dist.get_rank())
        if folder.has(generator):
            torch.set_rng_state(folder.read_tensors(generator)["state"])

    @classmethod
    def read_weights(cls, folder: StateFolder) -> dict[str, Tensor]:
        return folder.read_tensors(MODEL_FILE)

    def _optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors, which are there from the start, by the weight's name and their own."""
        return {
            f"{name}.{key}": value
            for name, master in self._masters.items()
            for key, value in self._optimizer.state[master].items()
        }

    def _collect_gradients(self) -> None:
        """Add what a backward pass left on the module to the masters' gradients, in float32."""
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                self._masters[name].grad += parameter.grad
                parameter.grad = None

    def _sum_gradients(self) -> None:
        """Sum over the shares: a draft's loss is its part of the global one, so gradients are not averaged."""
        import torch
        import torch.distributed as dist

        for bucket in self._buckets():
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self._shares)
            for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        for master in self._masters.values():
            bucket.append(master.grad)
            if sum(gradient.nbytes for gradient in bucket) >= self.config.bucket_mib << 20:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _put_back(self) -> None:
        """Copy the masters into the module, in its compute dtype."""
        import torch

        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                if name in self._masters:
                    parameter.copy_(self._masters[name])

    def _sum_outputs(self, outputs: Sequence[StepOutput]) -> StepOutput:
        return reduce(add, outputs).combined(self._sum)

    def _sum(self, values: Tensor) -> Tensor:
        import torch.distributed as dist

        dist.all_reduce(values, group=self._shares)
        return values

    def _compare(self, results: Tensor) -> None:
        """Raise RunError where another copy of this share has computed something else."""
        import torch
        import torch.distributed as dist

        everyones = [torch.empty_like(results) for _ in range(self.config.copies)]
        dist.all_gather(everyones, results, group=self._copies)
        if any(not torch.equal(results, other) for other in everyones):
            raise RunError(
                f"copies of one share differ in loss and gradient norm: {everyones}; check the devices"
            )


def _generator_file(rank: int) -> str:
    return f"generator-{rank}.safetensors"
