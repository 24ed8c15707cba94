"""A chain of proposals is what the unrolled training forward says with the proposals as its tokens."""

from __future__ import annotations

import pytest
import torch

from spec_draft_eagle3.draft import Eagle3Draft

from ..block_proposals import extend
from ..dense_parts import Document
from ..draft_batches import LLAMA3, make_batch, random_documents
from ..draft_parts import make_ops, make_target
from .cases import MLA, make_config, make_model

NUM_TOKENS = 4


def assert_proposals_are_the_unrolled_forwards(config, target, document, cuts):
    """Compare them with the unrolled steps of row 9 over the proposed tokens, which supervised tokens follow."""
    module, ops = make_model(target, config), make_ops(target)
    proposer, generator = Eagle3Draft(config).proposer(module, ops), torch.Generator().manual_seed(0)
    for start, stop in zip([0, *cuts], cuts, strict=False):
        extend(proposer, document, start, stop)
        proposal = proposer.propose(NUM_TOKENS, 0.7, generator)
    ids = torch.cat(
        [document.ids, torch.tensor(proposal.token_ids), torch.ones(NUM_TOKENS, dtype=torch.int64)]
    )
    states = torch.cat([document.states[:10], torch.randn(len(ids) - 10, *document.states.shape[1:])])
    if module.merged_token_id is not None:
        states[10:, 0] = ops.embed(ids[10:])
    longer = Document(ids=ids, states=states, mask=torch.ones(len(ids), dtype=torch.bool))
    unrolled, needed = module.unroll(make_batch([longer], [0]), ops)
    logits_KV = [module.lm_head(state_NH[needed.index_T[9]]) for state_NH in unrolled]
    for probs_V, logits_V in zip(proposal.probs_KV, logits_KV, strict=True):
        expected = torch.zeros(29).index_copy(0, module.ids_V, (logits_V / 0.7).softmax(-1))
        torch.testing.assert_close(probs_V, expected, rtol=1e-4, atol=1e-6)
    greedy = proposer.propose(1, 0.0, torch.Generator())
    assert greedy.probs_KV is None
    assert greedy.token_ids == (int(module.ids_V[logits_KV[0].argmax()]),)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocab_size": 11},
        {"fc_norm": False, "norm_output": False, "vocab_size": 11},
        {"num_layers": 3},
        MLA,
        {**MLA, "num_layers": 2, "vocab_size": 11},
    ],
    ids=["plain", "reduced", "reduced, no norms", "three layers", "mla", "mla, two layers, reduced"],
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
