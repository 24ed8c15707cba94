"""Context parallelism: ranks that divide a sample train as one rank does, at any mask and any cut of documents."""

import pytest
import torch
from safetensors.torch import load

from spec_backend_cpu.kernels import KERNELS
from spec_core.errors import ConfigError
from spec_draft_peagle.draft import PEagleDraft
from spec_strategy_fsdp.strategy import FsdpConfig, FsdpStrategy
from spec_testing.processes import run_ranks
from spec_testing.toy_target import toy_target

from ..strategy_megatron.training import LIMIT_S, Run, draft_of, train
from .same_training import assert_same
from .shares import Case, divided_step, summed_steps

DRAFTS = ("eagle3", "eagle3 whole", "eagle3 mla", "mtp", "dflash", "dflash2", "lilicorr", "dspark")
CHAINS = ("eagle3 whole", "mtp")
"""Drafts of which kernels are compared without checkpoints of their activations."""
AGAIN = {"checkpoint_activations": True}
SQUARE = tuple(name for name in KERNELS if not name.startswith("prefixed"))
"""Kernels of a backend without one for pieces of documents."""
TOLERANCE = 1e-9
"""Relative error of a step in float64."""
STEPS = 2
LONG = {"steps": 4}
"""Steps over which weights may drift apart."""
LONGEST = {"steps": 20}


def case(draft, *parts, **options):
    plugin, fixed = draft_of(draft)
    return Case(plugin, {**fixed, **options}, *parts)


FEW = [case(draft, 0.05) for draft in ("eagle3", "eagle3 mla", "mtp", "dflash")]
ALL = [case(draft, 1.0) for draft in DRAFTS]
CASES = [
    *FEW,
    *(case(draft, 0.5, tuple(KERNELS), **({} if draft in CHAINS else AGAIN)) for draft in DRAFTS),
    case("mtp", 0.5, SQUARE),
    case("eagle3 whole", 0.5, tuple(KERNELS), sliding_window=11),
    *(case(draft, 0.5, **AGAIN) for draft in ("eagle3 whole", "mtp", "dflash")),
    case("dflash", 1.0, num_anchors=3),
    case("eagle3", 0.5, image_embeddings="merged"),
    case("eagle3 whole", 1.0, image_embeddings="merged"),
]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, CASES[:3] + ALL[::2]), pytest.param(4, CASES, marks=pytest.mark.slow)],
    ids=["2", "4"],
)
def test_shares_add_up_to_one_rank_s_loss_metrics_and_gradients(tmp_path, size, cases):
    everyones = run_ranks(summed_steps, size, cases, tmp_path, timeout_s=LIMIT_S)
    for one, (output, gradients) in zip(cases, everyones[0], strict=True):
        expected, wanted = divided_step(one, tmp_path, None)
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=TOLERANCE), one
        for name, total in expected.sums.items():
            assert torch.allclose(output.sums[name].to(total.dtype), total, rtol=TOLERANCE, atol=TOLERANCE), (
                one,
                name,
            )
            assert torch.equal(output.counts[name].double(), expected.counts[name].double()), (one, name)
        largest = max(gradient.norm() for gradient in wanted.values())
        for name, gradient in load(gradients).items():
            assert (gradient - wanted[name].flatten()).norm() <= TOLERANCE * largest, (one, name)


def run(draft="eagle3", parts=1, replicas=1, **options):
    section = {"context_parallel": parts, "replicate": replicas}
    return Run(FsdpStrategy, draft, section, **{"steps": STEPS, **options})


def assert_divided_runs_are_whole_ones(folder, kinds, divided):
    """Train each of ``kinds`` on one rank, and ``divided``, pairs of a kind's number and a run, on four."""
    expected = train(1, folder / "whole", *(run(**kind) for kind in kinds))
    results = train(4, folder / "divided", *(one for _, one in divided))
    for (kind, _), result in zip(divided, results, strict=True):
        assert_same(result, expected[kind])


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_any_division_trains_the_same(tmp_path):
    """Two groups of two ranks, one of four, and groups with replicas; a chain, blocks, and Muon."""
    kinds = [{"draft": "eagle3", **LONG}, {"draft": "dflash", **LONG}, {"optimizer": "muon"}, {}]
    divided = [(number, run(**kinds[number], parts=2)) for number in range(3)]
    divided += [(number, run(**kinds[number], parts=4)) for number in range(2)]
    divided += [(3, run(**kinds[3], parts=2, replicas=2))]
    assert_divided_runs_are_whole_ones(tmp_path, kinds, divided)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_any_draft_trains_the_same_over_twenty_steps(tmp_path):
    """Each draft's gradients on two and four ranks are compared above, in float64."""
    kinds = [{**kind, **LONGEST} for kind in [*({"draft": draft} for draft in DRAFTS), {"optimizer": "muon"}]]
    pairs = [(number, run(**kind, parts=2)) for number, kind in enumerate(kinds)]
    everyone = [
        (number, run(**kinds[number], parts=4)) for number in (0, DRAFTS.index("dflash"), len(DRAFTS))
    ]
    assert_divided_runs_are_whole_ones(tmp_path, kinds, [*pairs, *everyone])


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_state_goes_on_in_any_other_division(tmp_path):
    half = {"steps": STEPS // 2}
    twice = {"steps": STEPS}
    pairs, everyone, replicas = {"parts": 2}, {"parts": 4}, {"parts": 2, "replicas": 2}
    expected, _ = train(1, tmp_path / "one", run(**twice), run(**half, save_to=tmp_path / "1"))
    saved = [run(**half, **way, save_to=tmp_path / name) for name, way in (("2", pairs), ("4", everyone))]
    resumed = [
        run(**half, **way, resume_from=tmp_path / state)
        for state, way in (("1", pairs), ("2", everyone), ("4", replicas))
    ]
    exact = [
        run(**half, **pairs, dtype="bfloat16", save_to=tmp_path / "exact"),
        run(**half, **pairs, dtype="bfloat16", resume_from=tmp_path / "exact"),
        run(**twice, **pairs, dtype="bfloat16"),
    ]
    results = train(4, tmp_path / "four", *saved, *resumed, *exact)
    for result in results[len(saved) : -len(exact)]:
        assert_same(result, expected)
    _, again, went_on = results[-len(exact) :]
    assert (again.losses, again.weights) == (went_on.losses[half["steps"] :], went_on.weights)  # to the bit
    for result in train(1, tmp_path / "back", *(run(**half, resume_from=tmp_path / state) for state in "24")):
        assert_same(result, expected)


def test_ranks_that_divide_a_sample_get_the_same_samples():
    config = FsdpConfig(context_parallel=2)
    places = [FsdpStrategy.data_parallel(config, rank, 4) for rank in range(4)]
    assert [(place.rank, place.size) for place in places] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_what_cannot_be_divided_is_refused(tmp_path):
    config, target = FsdpConfig(context_parallel=4), toy_target(tmp_path)
    with pytest.raises(
        ConfigError, match=r"context_parallel=4 does not divide train.ranks=6; set train.ranks"
    ):
        FsdpStrategy.data_parallel(config, 0, 6)
    hints = PEagleDraft(PEagleDraft.Config()).shard_hints(target)
    with pytest.raises(ConfigError, match=r"context_parallel=4 needs a draft .*; remove it"):
        FsdpStrategy.check(config, target, hints)
    FsdpStrategy.check(FsdpConfig(replicate=4), target, hints)
