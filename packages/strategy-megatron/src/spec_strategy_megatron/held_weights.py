"""HeldWeights converts between full weights and the elements that one rank holds.

A tensor-parallel rank holds a shard of each trained weight, and its optimizer a range of this shard's master.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from spec_kit.sharding import FlatShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from spec_strategy_megatron.config import MegatronConfig
    from spec_strategy_megatron.divided_module import Division
    from spec_strategy_megatron.megatron_parts import Master


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """The trained weights of a draft, in the form in which one rank of the mesh holds them."""

    config: MegatronConfig
    mesh: DeviceMesh
    trained: Mapping[str, nn.Parameter]
    """The module's parameters: this tensor-parallel rank's shard of each weight."""
    masters: Mapping[str, Master]
    divisions: Mapping[str, Division]
    """The Division of each divided weight, by name."""

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full weight."""
        shape = list(self.trained[name].shape)
        if division := self.divisions.get(name):
            shape[division.dimension] *= self.config.tensor_parallel // division.copies
        return tuple(shape)

    def part(self, name: str) -> Tensor:
        """Return this tensor-parallel rank's shard of a weight, in float32. Collective over the data axis."""
        parameter = self.trained[name].detach()
        if parameter.dtype == torch.float32:
            return parameter
        return self.joined(name, self.masters[name].values)

    def joined(self, name: str, values: Tensor) -> Tensor:
        """Join the ``values`` (float32 [n]) of all data-parallel ranks into this tensor-parallel rank's shard."""
        parameter = self.trained[name]
        if not self.config.distributed_optimizer:
            return values.view(parameter.shape)
        # The bits are summed as integers, which are 0 on all ranks but one, so that elements keep their bits.
        bits = torch.zeros(parameter.shape, dtype=torch.int32, device=parameter.device)
        self.masters[name].of(bits).copy_(values.view(torch.int32))
        dist.all_reduce(bits, group=self.mesh.get_group("data"))
        return bits.view(torch.float32)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the full tensor, of which each tensor-parallel rank has a shard ``part``."""
        if (division := self.divisions.get(name)) is None:
            return part
        placements = [Replicate(), Shard(division.dimension)]
        whole = DTensor.from_local(part, self.mesh, placements, run_check=False).full_tensor()
        parts = whole.chunk(self.config.tensor_parallel, division.dimension)
        return torch.cat(parts[:: division.copies], division.dimension) if division.copies > 1 else whole

    def gather(self, name: str, values: Tensor) -> Tensor:
        """Return the full tensor. Each rank's ``values`` have the layout of its float32 master weights."""
        return self.whole(name, self.joined(name, values.reshape(-1)))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's elements of a full tensor, in the layout of the rank's float32 master weights."""
        if division := self.divisions.get(name):
            parts = self.config.tensor_parallel // division.copies
            index = self.mesh.get_local_rank("tensor") // division.copies
            whole = whole.chunk(parts, division.dimension)[index]
        master = self.masters[name]
        return master.of(whole.contiguous()).view(master.tensor.shape)

    def shard(self, name: str, value: Tensor) -> FlatShard:
        """Return the form in which this rank saves ``value``, a tensor of a weight's optimizer state.

        ``value`` has the layout of the weight's float32 master, or is a scalar. A scalar is saved once for
        the weight, by the rank that has the weight's first element.
        """
        scalar = not value.ndim
        master = self.masters[name]
        division = self.divisions.get(name)
        data, tensor = self.mesh.get_local_rank("data"), self.mesh.get_local_rank("tensor")
        index, copy = divmod(tensor, division.copies if division else self.config.tensor_parallel)
        part = () if scalar else tuple(self.trained[name].shape)
        offset = [0] * len(part)
        if part and division:
            offset[division.dimension] = index * part[division.dimension]
        return FlatShard(
            shape=self.whole_shape(name) if part else (),
            offset=tuple(offset),
            part=part,
            first=0 if scalar else master.first,
            # A rank without an element of the weight has no state of it, and thus no number of steps either.
            values=value.detach().view(-1)[: len(master.values)],
            saves=copy == 0
            and (data == 0 or self.config.distributed_optimizer)
            and not (scalar and master.first),
        )
