"""A chain of proposals is what the unrolled training forward says with the proposals as its tokens."""

import pytest
import torch

from spec_draft_eagle3.draft import Eagle3Draft

from ..block_proposals import assert_rounds_are_counted, extend
from ..draft_batches import LLAMA3, random_documents
from ..draft_parts import make_ops, make_target
from .cases import MLA, PUBLISHED, make_config, make_model
from .unrolled_chain import assert_proposals_are_the_unrolled_forwards


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocab_size": 11},
        {"fc_norm": False, "norm_output": False, "vocab_size": 11},
        {"num_layers": 3},
        {"sliding_window": 6},
        {"sliding_window": 5, "num_layers": 2},
        {**PUBLISHED, "num_layers": 2},
        MLA,
        {**MLA, "num_layers": 2, "vocab_size": 11},
    ],
    ids=[
        "plain",
        "reduced",
        "reduced, no norms",
        "three layers",
        "window",
        "window, two layers",
        "published norms",
        "mla",
        "mla, two layers, reduced",
    ],
)
@pytest.mark.parametrize("cuts", [[10], [1, 9, 10], [3, 4, 10], list(range(1, 11))], ids=str)
def test_chain_equals_the_unrolled_forward(options, cuts):
    target, config = make_target(rope=LLAMA3), make_config(**options)
    (document,) = random_documents(target, [11], seed=4)
    assert_proposals_are_the_unrolled_forwards(config, target, document, cuts)


def test_drawn_tokens_follow_their_probabilities():
    target, config = make_target(rope=LLAMA3), make_config(vocab_size=11)
    (document,) = random_documents(target, [11], seed=4)
    proposer = Eagle3Draft(config).proposer(make_model(target, config), make_ops(target))
    extend(proposer, document, 0, 10)
    generator = torch.Generator().manual_seed(0)
    drawn = proposer.propose_all([proposer] * 2000, 1, 1.0, [generator] * 2000)
    share = torch.bincount(torch.tensor([p.token_ids[0] for p in drawn]), minlength=29) / len(drawn)
    assert (share - drawn[0].probs_KV[0]).abs().max() < 0.03


def test_evaluation_counts_the_rounds_of_the_proposer():
    target, config = make_target(rope=LLAMA3), make_config()
    documents = random_documents(target, [60, 60], seed=4)
    assert_rounds_are_counted(Eagle3Draft(config), make_model(target, config), target, documents, 4)
