"""Replicas of a sharded draft (HSDP): any split of ranks trains the same, and goes on from any other."""

import pytest

from spec_core.errors import ConfigError
from spec_strategy_fsdp.strategy import FsdpConfig, FsdpStrategy

from ..strategy_megatron.training import LIMIT_S, Run, train
from .same_training import assert_same

STEPS = 1
SPLITS = (1, 2, 4)
"""Numbers of replicas that four ranks are split into."""
KINDS = [{}, {"draft": "dflash"}, {"optimizer": "muon"}]
SAVED = [*((0, split) for split in SPLITS), (2, 2)]
"""Kinds and splits whose state is saved after half of the steps."""
STATES = {0: ("1", "4-1", "4-2", "4-4"), 2: ("1", "4-2")}
"""Saved states of each kind: ``4-2`` is of four ranks, split into two replicas."""
RESUMED = [
    *((0, split, state) for split, state in ((1, "4-2"), (2, "4-4"), (4, "4-1"))),
    *((2, split, state) for split, state in ((2, "1"), (4, "4-2"))),
]
"""Kinds, splits, and the states that they go on from: each split goes on, and from each split."""


def run(replicas, draft="eagle3", **options):
    return Run(FsdpStrategy, draft, {"replicate": replicas}, **{"steps": 2 * STEPS, **options})


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    ("trained", "resumed"),
    [
        pytest.param([(1, 2), (2, 4)], RESUMED, id="each"),
        pytest.param(
            [(kind, split) for kind in range(3) for split in SPLITS],
            [
                (kind, split, state)
                for split in SPLITS
                for kind in STATES
                for state in STATES[kind]
                if state != f"4-{split}"
            ],
            id="every pair",
        ),
    ],
)
def test_any_split_trains_the_same_and_goes_on_from_another(tmp_path, trained, resumed):
    """AdamW and Muon; four ranks as one replica, as two, and as four; exports and pushes of one state."""
    whole = [run(1, **kind) for kind in KINDS]
    half = [run(1, steps=STEPS, save_to=tmp_path / f"1-{kind}", **KINDS[kind]) for kind in STATES]
    *expected, half, half_with_muon = train(1, tmp_path / "one", *whole, *half)
    trained = [(kind, run(split, **KINDS[kind])) for kind, split in trained]
    saved = [
        run(split, steps=STEPS, save_to=tmp_path / f"4-{split}-{kind}", **KINDS[kind])
        for kind, split in SAVED
    ]
    resumed = [
        (kind, run(split, steps=STEPS, resume_from=tmp_path / f"{state}-{kind}", **KINDS[kind]))
        for kind, split, state in resumed
    ]
    exact = [
        run(2, dtype="bfloat16"),
        run(2, dtype="bfloat16", steps=STEPS, save_to=tmp_path / "exact"),
        run(2, dtype="bfloat16", steps=STEPS, resume_from=tmp_path / "exact"),
    ]
    loaded = [run(split, steps=0, resume_from=tmp_path / "exact") for split in SPLITS]
    compared = [*trained, *resumed]
    runs = [*saved, *(one for _, one in compared), *exact, *loaded]
    results = dict(zip(map(id, runs), train(4, tmp_path / "four", *runs), strict=True))
    for (kind, _), one in zip(SAVED, saved, strict=True):
        assert_same(results[id(one)], half_with_muon if kind else half)
    for kind, one in compared:
        assert_same(results[id(one)], expected[kind])
    went_on, _, again = (results[id(one)] for one in exact)
    assert (again.losses, again.weights) == (went_on.losses[STEPS:], went_on.weights)  # to the bit
    back = [run(1, steps=STEPS, resume_from=tmp_path / f"4-{split}-0") for split in SPLITS]
    *back, alone = train(1, tmp_path / "back", *back, run(1, steps=0, resume_from=tmp_path / "exact"))
    for result in back:
        assert_same(result, expected[0])
    files = [alone, *(results[id(one)] for one in loaded)]
    assert all((one.exported, one.pushed) == (alone.exported, alone.pushed) for one in files)  # to the bit


def test_replicas_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"strategy.replicate=3 does not divide train.ranks=4; set train.ranks to a multiple of 3",
    ):
        FsdpStrategy.data_parallel(FsdpConfig(replicate=3), 0, 4)


def test_a_replica_s_ranks_divide_the_draft():
    counts = FsdpStrategy.shard_counts(FsdpConfig(replicate=2), 8)
    assert (counts.weights, counts.vocabulary) == (4, 1)
