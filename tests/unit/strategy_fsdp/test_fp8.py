"""Products in fp8 on two ranks: the first step is that of one rank, and a run is resumed to the bit."""

import pytest

from spec_strategy_fsdp.strategy import FsdpStrategy

from ...fp8_on_cpus import needs_fp8
from ..strategy_megatron.training import LIMIT_S, Run, train

STEPS = 1
CASES = (("eagle3", "layers"), ("dflash", "frozen"))


@needs_fp8
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_ranks_train_in_fp8(tmp_path):
    runs = []
    for index, (draft, fp8) in enumerate(CASES):
        half = tmp_path / f"half-{index}"
        runs.append(Run(FsdpStrategy, draft, fp8=fp8, dtype="bfloat16", steps=2 * STEPS))
        runs.append(Run(FsdpStrategy, draft, fp8=fp8, dtype="bfloat16", steps=STEPS, save_to=half))
        runs.append(Run(FsdpStrategy, draft, fp8=fp8, dtype="bfloat16", steps=STEPS, resume_from=half))
    one_step = [Run(FsdpStrategy, draft, fp8=fp8, dtype="bfloat16", steps=1) for draft, fp8 in CASES]
    without = [Run(FsdpStrategy, draft, dtype="bfloat16", steps=1) for draft, _ in CASES]
    two = train(2, tmp_path / "two", *runs)
    one = train(1, tmp_path / "one", *one_step, *without)
    for index, case in enumerate(CASES):
        whole, _, resumed = two[3 * index : 3 * index + 3]
        assert (resumed.losses, resumed.weights) == (whole.losses[STEPS:], whole.weights), case
        assert whole.losses[0] == pytest.approx(one[index].losses[0], rel=1e-5), case
        assert one[index].losses[0] != one[len(CASES) + index].losses[0], case
