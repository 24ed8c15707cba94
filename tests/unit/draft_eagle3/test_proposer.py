"""A chain of proposals is what the unrolled training forward says with the proposals as its tokens."""

from itertools import chain

import pytest
import torch

from spec_draft_eagle3.draft import Eagle3Draft

from ..block_proposals import extend
from ..dense_parts import Document
from ..draft_batches import LLAMA3, make_batch, random_documents
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


PROMPT = 4


def answered(target, module, seed, rounds):
    """A document whose answer is written in rounds, which accept these numbers of the proposer's guesses."""
    (document,) = random_documents(target, [60], seed=seed)
    proposer, read, ids = Eagle3Draft(module.config).proposer(module, make_ops(target)), 0, document.ids
    known = PROMPT  # the answer's first token
    for accepted in rounds:
        extend(proposer, document, read, known)
        guesses = proposer.propose(4, 0.0, torch.Generator()).token_ids
        ids[known + 1 : known + 1 + accepted] = torch.tensor(guesses[:accepted])
        read, known = known, known + 1 + accepted
        ids[known] = 0 if accepted < 4 and guesses[accepted] == 1 else 1
    mask = torch.arange(60) >= PROMPT
    return Document(ids[: known + 1], document.states[: known + 1], mask[: known + 1])


def test_evaluation_counts_the_rounds_of_the_proposer():
    target, config = make_target(rope=LLAMA3), make_config()
    module, ops = make_model(target, config), make_ops(target)
    rounds = [[2, 0, 4, 1, 4, 3], [0, 0, 1]]
    documents = [answered(target, module, seed, one) for seed, one in enumerate(rounds)]
    batch, ones = make_batch(documents, [3, 0]), torch.ones(4, dtype=torch.float64)
    with torch.no_grad():
        metrics = module(batch, ones, ops).metrics()
    accepted = [*chain(*rounds)]
    assert metrics["acceptance_per_position"] == pytest.approx(
        [sum(one > place for one in accepted) / 9 for place in range(4)]
    )
    assert metrics["acceptance_length_rounds"] == pytest.approx(1 + sum(accepted) / 9)
    assert "acceptance_per_position" not in module(batch, ones, ops).metrics()
