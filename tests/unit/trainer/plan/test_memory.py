"""Sizes of a run before anything is built, against the very modules, optimizers and files."""

import math
from dataclasses import replace

import pytest
import torch

from spec_core import TrainedWeight, map_here
from spec_engine_sglang.config import SglangConfig
from spec_kit.targets import read_target_tensors
from spec_trainer.plan.memory import RunSizes, rooms


@pytest.mark.parametrize("draft", ["eagle3", "dflash", "dflash2", "lilicorr", "dspark", "peagle"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sizes_are_those_of_what_is_built(resolved, draft, optimizer):
    run = resolved(f"draft.name={draft}", f"optimizer.name={optimizer}")
    sizes, state = RunSizes(run), torch.random.get_rng_state()
    built = run.draft.build(run.target, read_target_tensors(run.target), None)
    hints = run.draft.shard_hints(run.target)
    weights = [
        TrainedWeight(
            name=name, values=value, shape=tuple(value.shape), is_vocabulary=hints.is_vocabulary(name)
        )
        for name, value in built.named_parameters()
    ]
    kept = run.optimizer.build(weights, map_here).state.values()
    assert sizes.weights == {weight.name: weight.shape for weight in weights}
    assert sizes.num_trained == sum(value.numel() for value in built.parameters())
    assert sizes.optimizer_bytes == sum(value.nbytes for values in kept for value in values.values())
    torch.random.set_rng_state(state)


def test_measuring_draws_no_random_number(resolved):
    run = resolved()
    before = torch.random.get_rng_state()
    assert RunSizes(run).state_bytes > 0
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_target_is_counted_in_the_engines_dtype(resolved):
    run = resolved()
    stored = sum(math.prod(tensor.shape) for tensor in read_target_tensors(run.target).others.values())
    assert RunSizes(run).target_bytes == 4 * stored
    assert RunSizes(resolved("engine.dtype=bfloat16")).target_bytes == 2 * stored


def test_an_engine_that_computes_in_the_stored_dtype_loads_what_is_stored(resolved):
    run = resolved()
    config = run.config.model_copy(update={"engine": SglangConfig(name="sglang")})
    assert config.engine.dtype == "auto"
    assert RunSizes(replace(run, config=config)).target_bytes == RunSizes(run).target_bytes


def test_engines_and_ranks_are_counted_each(resolved):
    def least(*words: str) -> dict[str, int]:
        run = resolved(*words)
        (room,) = (room for room in rooms(run, RunSizes(run)) if "memory" in room.name)
        return {part.what: part.num_bytes for part in room.parts}

    one = least("placement.kind=disaggregated")
    more = least("placement.kind=disaggregated", "engine.replicas=3", "train.ranks=2")
    assert more["the target's weights in 3 engines"] == 3 * one["the target's weights in 1 engine"]
    assert more["features in flight"] == 2 * one["features in flight"]
    trained = "weights, gradients and optimizer state of the draft"
    assert more[trained] == one[trained]  # two ranks share it
