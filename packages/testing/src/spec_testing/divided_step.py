"""Compute a training step on two ranks that divide the draft, and the same step on one rank (D13)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from spec_core import Draft, StepConfig, Strategy, StrategyConfig, plugins
from spec_core.errors import ConfigError, PluginError
from spec_core.records import DraftBatch, StepOutput
from spec_testing.draft_workbench import Workbench, build
from spec_testing.limits import patient
from spec_testing.processes import Rank, run_ranks
from spec_testing.toy_optimizers import PlainDescent
from spec_testing.toy_target import ToySample, toy_batch, toy_target

LIMIT_S = patient(240.0)
"""Longest time, in seconds, of the two ranks; most of it is spent on imports."""
RANKS = 2
LARGE = 1e6
"""Gradient clipping norm and learning rate: large, so that a wrong gradient changes weights by more than
rounding."""
SIZES: dict[str, Any] = {"vocab_size": 98, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
"""Sizes of the toy target that two ranks can divide."""


@dataclass(frozen=True, kw_only=True)
class DividedStep:
    """A draft and a strategy that divides it over ranks. ``others``: further tensors of the target."""

    draft: type[Draft]
    options: dict[str, object]
    others: Mapping[str, Tensor]
    strategy: type[Strategy]
    folder: Path

    def bench(self) -> Workbench:
        """Return the draft on a target that two ranks can divide, with weights as large as trained ones."""
        instance = self.draft(self.draft.Config.model_validate({"name": self.draft.name, **self.options}))
        return build(instance, toy_target(self.folder, **SIZES), others=self.others).use_large_weights()

    def configs(self, bench: Workbench) -> list[StrategyConfig]:
        """Return the configurations of ``Strategy.divisions`` that the strategy accepts for this draft."""
        hints = bench.draft.shard_hints(bench.target)
        accepted: list[StrategyConfig] = []
        for config in self.strategy.divisions(RANKS):
            with suppress(ConfigError):
                self.strategy.check(config, bench.target, hints)
                accepted.append(config)
        return accepted

    def results(self) -> Iterator[tuple[StepOutput, dict[str, Tensor]]]:
        """Yield each rank's output and gradients of one step, for each way to divide the draft."""
        for results in run_ranks(_step_divided, RANKS, self, timeout_s=LIMIT_S):
            for output, gradients in results:
                yield output, load(gradients)


def divided_steps(
    draft: type[Draft], options: dict[str, object], others: Mapping[str, Tensor], folder: Path
) -> list[DividedStep]:
    """Return a DividedStep for each strategy that can divide the draft here; skip the test if none can."""
    loaded = [plugin for _, plugin in plugins.load_each(Strategy) if not isinstance(plugin, PluginError)]
    cases = [
        DividedStep(draft=draft, options=options, others=others, strategy=plugin, folder=folder)
        for plugin in loaded
        if plugin.divisions(RANKS) and plugin.probe().ok
    ]
    if not any(case.configs(case.bench()) for case in cases):
        pytest.skip("no strategy that can run here divides such a draft over two ranks")
    return cases


def batches_of(bench: Workbench) -> tuple[list[DraftBatch], Tensor]:
    """Return three micro-batches and their denominators: the second is empty, the third has an engine's rounds."""
    samples = bench.samples()
    judged = [_judged(sample, len(samples)) for sample in samples]
    empty = toy_batch([], bench.schema, width=3)
    batches = [toy_batch(samples, bench.schema), empty, toy_batch(judged, bench.schema)]
    return batches, bench.denominators([*samples, *judged])


def _judged(sample: ToySample, after: int) -> ToySample:
    """Return the sample as an engine's answer, under a later id: of each round, one guess or none was refused."""
    depths = (0, 1, 1, 2, 1, 2)
    depth_T = torch.tensor([depths[index % 6] for index in range(len(sample.input_ids))])
    return replace(sample, sample_id=sample.sample_id + after, guess_depth=depth_T)


def _step_divided(me: Rank, case: DividedStep) -> list[tuple[StepOutput, bytes]]:
    """Return the output and the gradients, as safetensors, of one step for each way to divide the draft."""
    group = f"file://{case.folder}/group-{case.strategy.name}"
    dist.init_process_group("gloo", init_method=group, rank=me.rank, world_size=me.world_size)
    results = [_step(case, config) for config in case.configs(case.bench())]
    dist.destroy_process_group()
    return results


def _step(case: DividedStep, config: StrategyConfig) -> tuple[StepOutput, bytes]:
    bench = case.bench()
    batches, denominators = batches_of(bench)
    optimizer = PlainDescent(PlainDescent.Config())
    with case.strategy(config, StepConfig(clip=LARGE), optimizer, torch.device("cpu")) as strategy:
        strategy.attach(bench.module, bench.draft.shard_hints(bench.target))
        ops = strategy.vocabulary_ops(bench.target, bench.tensors)
        before = {name: value.clone() for name, value in strategy.full_weights().items()}  # they may be live
        done = strategy.step(batches, denominators, ops, LARGE)
        after = strategy.full_weights()
    moved = {name: before[name] - value for name, value in after.items() if value.is_floating_point()}
    return done.output, save({name: (value / LARGE).contiguous() for name, value in moved.items()})
