"""Steps of drafts whose ranks each compute a share, in real processes, which import no other module of the tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from spec_backend_cpu.kernels import KERNELS
from spec_core import Draft
from spec_core.records import StepOutput
from spec_kit.layers import TargetOps
from spec_strategy_fsdp.context_ranks import ContextRanks
from spec_testing.draft_workbench import Workbench, build
from spec_testing.processes import Rank
from spec_testing.toy_target import toy_batch, toy_target

LENGTHS = (11, 1, 7, 40, 5, 2, 13, 9)
"""Longer and shorter than the pieces that documents are cut into."""
IMAGE = 5
"""Token of an image's rows."""
SIZES: dict[str, Any] = {"vocab_size": 98, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Case:
    """A draft, and how it computes a step."""

    plugin: type[Draft]
    options: dict[str, object] = field(default_factory=dict)
    supervised: float = 0.5
    """Share of supervised tokens, drawn at random."""
    kernels: tuple[str, ...] = ()
    """Names of the CPU's kernels that the draft may use."""


def _bench(case: Case, folder: Path) -> Workbench:
    plugin = case.plugin
    draft = plugin(plugin.Config.model_validate({"name": plugin.name, **case.options}))
    target = replace(toy_target(folder, **SIZES), image_token_id=IMAGE)
    bench = build(
        draft, target, others={target.norm_name: torch.ones(target.hidden_size)}
    ).use_large_weights()
    bench = bench.with_kernels({name: KERNELS[name] for name in case.kernels}.get)
    # In float64, so that an error shows that is smaller than float32's rounding.
    ops = TargetOps(target, bench.tensors, torch.device("cpu"), torch.float64)
    return replace(bench, module=bench.module.double(), ops=ops)


def divided_step(
    case: Case, folder: Path, ranks: ContextRanks | None
) -> tuple[StepOutput, dict[str, Tensor]]:
    """Return the output and gradients of this rank's share of three micro-batches: packed, padded, empty."""
    bench, generator = _bench(case, folder), torch.Generator().manual_seed(5)
    samples = [
        replace(sample, loss_mask=torch.rand(len(sample.input_ids), generator=generator) < case.supervised)
        for sample in bench.samples(LENGTHS)
    ]
    for sample in samples:
        sample.input_ids[torch.rand(len(sample.input_ids), generator=generator) < 0.3] = IMAGE
    cuts = [(samples[:5], 0), (samples[5:], 10), ([], 3)]
    batches = [replace(toy_batch(cut, bench.schema, width), context=ranks) for cut, width in cuts]
    output = bench.forward_backward(batches, bench.denominators(samples))
    return output, bench.gradients()


def summed_steps(me: Rank, cases: Sequence[Case], folder: Path) -> list[tuple[StepOutput, bytes]]:
    """Return, of each case, the sums of all ranks' outputs and gradients."""
    init = f"file://{folder}/group-{me.world_size}"
    dist.init_process_group("gloo", init_method=init, rank=me.rank, world_size=me.world_size)
    group = dist.new_group(list(range(me.world_size)))
    ranks, results = ContextRanks(group), list[tuple[Any, bytes]]()

    def summed(values: Tensor) -> Tensor:
        dist.all_reduce(values, group=group)
        return values

    for case in cases:
        output, gradients = divided_step(case, folder, ranks)
        flat = summed(torch.cat([gradient.flatten() for gradient in gradients.values()]))
        parts = flat.split([gradient.numel() for gradient in gradients.values()])
        totals = {name: part.clone() for name, part in zip(gradients, parts, strict=True)}
        results.append((output.combined(summed), save(totals)))
    dist.destroy_process_group()
    return results
