"""A head with experts trains the same on any number of ranks, and goes on from a saved state to the bit."""

import pytest

from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_testing.toy_target import toy_target

from ...mtp_targets import write_config
from ..strategy_megatron.training import LIMIT_S, SIZES, Run, train
from .same_training import assert_same

STEPS = 2


def run(**options):
    replicate, parts = options.pop("replicate", 1), options.pop("parts", 1)
    section = {"replicate": replicate, "context_parallel": parts}
    return Run(FsdpStrategy, "mtp", section, **{"steps": STEPS, **options})


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "deepseek_v3"])
def test_any_division_trains_the_same(kind, tmp_path):
    for name in ("one", "two"):
        write_config(kind, toy_target(tmp_path / name, **SIZES))
    plain, muon = train(1, tmp_path / "one", run(), run(optimizer="muon"))
    bf16 = {"dtype": "bfloat16"}
    runs = [
        run(),
        run(replicate=2),
        run(parts=2),
        run(optimizer="muon"),
        run(**bf16, steps=2 * STEPS),
        run(**bf16, save_to=tmp_path / "state"),
        run(**bf16, resume_from=tmp_path / "state"),
    ]
    *same, with_muon, whole, _, again = train(2, tmp_path / "two", *runs)
    for result in same:
        assert_same(result, plain)
    assert_same(with_muon, muon)
    assert (again.losses, again.weights) == (whole.losses[STEPS:], whole.weights)  # to the bit
