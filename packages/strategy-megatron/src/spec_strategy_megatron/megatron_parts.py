"""Megatron's data parallel, and its optimizer around torch's AdamW, with groups that it is handed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from spec_core import OptimizerConfig


def data_parallel(module: nn.Module, mesh: DeviceMesh, alone: ProcessGroup) -> DistributedDataParallel:
    """Return the module with float32 gradients that are summed over the mesh's data axis. ``alone``: this process."""
    groups = ProcessGroupCollection()
    groups.dp = groups.dp_cp = groups.expt_dp = mesh.get_group("data")
    groups.tp, groups.pp, groups.ep = mesh.get_group("tensor"), alone, alone
    # Of the sizes only the parallel one is read; "per token" stands for: gradients are summed, not averaged.
    config = TransformerConfig(
        num_layers=1,
        hidden_size=mesh["tensor"].size(),
        num_attention_heads=mesh["tensor"].size(),
        tensor_model_parallel_size=mesh["tensor"].size(),
        calculate_per_token_loss=True,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    return DistributedDataParallel(config, settings, module, pg_collection=groups)


def build_optimizer(
    parameters: Sequence[nn.Parameter], settings: OptimizerConfig, device: torch.device, tensor: ProcessGroup
) -> MegatronOptimizer:
    """Return AdamW over float32 masters, with the norm of the gradients taken over the group ``tensor`` too."""
    matrices, others = ([p for p in parameters if (p.ndim >= 2) == wanted] for wanted in (True, False))
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    config = MegatronOptimizerConfig(
        optimizer="adam", lr=0.0, clip_grad=settings.clip, bf16=settings.dtype == "bfloat16"
    )
    optimizer = (
        Float16OptimizerWithFloat16Params(adam, config, None, lambda *_: None)
        if config.bf16
        else FP32Optimizer(adam, config, lambda *_: None)
    )
    optimizer.grad_stats_parallel_group = optimizer.tp_group = tensor
    for group in adam.param_groups:
        for master in group["params"]:
            # AdamW makes its state in the first step; a checkpoint must have tensors to load into before that.
            adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
    return optimizer
