"""Samples of very different lengths, balanced over ranks by the costs of real drafts for real targets."""

import json
import math
import random
from functools import cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import pytest

from spec_core import Draft
from spec_core.plugins import load
from spec_kit.targets import read_target
from spec_trainer.run.batch_schedule import GlobalBatch

from ....docs.recipes import CONFIGS, write_tensors

MEASURED = Path(__file__).parents[4] / "benchmarks/results/h200-document-length.json"
EAGLE3, DFLASH = ("eagle3", "Qwen/Qwen3-8B", 32000), ("dflash", "Qwen/Qwen3-8B")
OTHERS = [(name, "Qwen/Qwen3-8B") for name in ("dspark", "dflash2", "lilicorr", "peagle")] + [
    ("mtp", "Qwen/Qwen3.5-27B")
]


@cache
def cost_of(name, model, vocab_size=None):
    """Return the sample cost of a draft for a target of which only the config.json is real."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[model]))
        write_tensors(Path(folder), CONFIGS[model])
        options = {} if vocab_size is None else {"vocab_size": vocab_size}
        draft = load(Draft, name)
        made = draft(draft.Config.model_validate({"name": name, **options}))
        return made.cost(read_target(Path(folder))).sample_flops


@pytest.mark.parametrize("draft", [EAGLE3, DFLASH])
def test_costs_grow_as_the_times_that_were_measured_on_an_h200(draft):
    """The file has one document of 2,048 to 65,536 tokens, of which the last 70 % are supervised."""
    rows = json.loads(MEASURED.read_text())["lengths"][f"{draft[0]}, checkpoint_activations=false"]["rows"]
    time_ms = {row["tokens"]: row["wall_ms"] for row in rows}
    cost = cost_of(*draft)
    for tokens in (4096, 16384, 32768, 65536):  # part of the shortest step does not grow
        grown = cost(tokens, int(0.7 * tokens)) / cost(8192, int(0.7 * 8192))
        assert grown == pytest.approx(time_ms[tokens] / time_ms[8192], rel=0.12)


@pytest.mark.parametrize("draft", [EAGLE3, DFLASH, *OTHERS])
def test_costs_grow_with_the_supervised_tokens_and_with_the_length(draft):
    cost = cost_of(*draft)
    assert cost(2048, 400) > cost(2048, 100) > cost(2048, 0) > 0
    assert cost(65536, 400) > cost(2048, 400)


def test_a_long_sample_has_no_more_blocks_than_a_short_one_so_it_costs_little_more():
    cost = cost_of(*DFLASH)
    assert cost(65536, 45000) < 4 * cost(2048, 1400)


def heavy_tailed(rng):
    return min(65536, int(2048 * rng.paretovariate(1.2)))


def uniform_in_the_logarithm(rng):
    return int(2048 * math.exp(rng.random() * math.log(32)))


def short(rng):
    return min(2048, max(16, int(rng.lognormvariate(math.log(1000), 0.7))))


def imbalances(make_schedule, length_of, cost):
    """Return the mean imbalance of cost over ten steps of 8 ranks with 2^17 tokens each: by tokens, by cost."""
    rng, found = random.Random(1), {"tokens": [], "cost": []}
    for _ in range(10):
        lengths = [length_of(rng)]
        while sum(lengths) < 1 << 20:
            lengths.append(length_of(rng))
        item = GlobalBatch(0, False, 0, tuple(range(len(lengths))))
        for balance, values in found.items():
            schedule = make_schedule(lengths, sample_flops=cost, ranks=8, balance=balance)
            values.append(schedule.cost_imbalance(item))
    return fmean(found["tokens"]), fmean(found["cost"])


@pytest.mark.parametrize(
    ("length_of", "draft", "by_tokens", "by_cost"),
    [
        (heavy_tailed, EAGLE3, 1.175, 1.005),
        (heavy_tailed, DFLASH, 1.052, 1.023),
        (uniform_in_the_logarithm, EAGLE3, 1.063, 1.005),
        (uniform_in_the_logarithm, DFLASH, 1.052, 1.045),
        (short, EAGLE3, 1.000, 1.000),
        (short, DFLASH, 1.001, 1.001),
    ],
)
def test_ranks_wait_less_for_each_other(make_schedule, length_of, draft, by_tokens, by_cost):
    found = imbalances(make_schedule, length_of, cost_of(*draft))
    assert found == pytest.approx((by_tokens, by_cost), abs=0.001)
