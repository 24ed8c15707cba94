"""A chain of proposals is what the unrolled training forward says with the proposals as its tokens."""

from __future__ import annotations

import pytest
import torch

from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..dense_parts import Document
from ..draft_batches import LLAMA3, make_batch, random_documents
from ..draft_parts import make_ops, make_target
from .cases import MLA, make_model

NUM_TOKENS = 4


def setup(**options):
    config = Eagle3Config(num_steps=NUM_TOKENS, **options)
    target = make_target(rope=LLAMA3)
    module, ops = make_model(target, config), make_ops(target)
    (document,) = random_documents(target, [11], seed=4)
    return module, ops, document, Eagle3Draft(config).proposer(module, ops)


def extend(proposer, document, start, stop):
    """Positions start to stop, of which the last has no token behind it that the target has seen."""
    proposer.extend(document.ids[start + 1 : stop + 1].tolist(), document.states[start:stop])


def unrolled(module, document, ops):
    """The head's input of row 9 at each step; supervised tokens behind the document label it at every one."""
    longer = Document(
        ids=torch.cat([document.ids, torch.ones(NUM_TOKENS, dtype=torch.int64)]),
        states=torch.cat([document.states, document.states[-NUM_TOKENS:]]),
        mask=torch.ones(len(document.ids) + NUM_TOKENS, dtype=torch.bool),
    )
    states, needed = module.unroll(make_batch([longer], [0]), ops)
    return [state_NH[needed.index_T[9]] for state_NH in states]


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
@pytest.mark.parametrize("cuts", [[10], [1, 9], [3, 4, 10], list(range(1, 11))], ids=str)
def test_chain_equals_the_unrolled_forward(options, cuts):
    module, ops, document, proposer = setup(**options)
    generator = torch.Generator().manual_seed(0)
    for start, stop in zip([0, *cuts], [*cuts, 10], strict=False):
        if start < stop:
            extend(proposer, document, start, stop)
            proposal = proposer.propose(NUM_TOKENS, 0.7, generator)
    guessed = Document(
        ids=torch.cat([document.ids, torch.tensor(proposal.token_ids)]),
        states=torch.cat([document.states[:10], torch.randn(1 + NUM_TOKENS, *document.states.shape[1:])]),
        mask=torch.ones(11 + NUM_TOKENS, dtype=torch.bool),
    )
    for step, state_H in enumerate(unrolled(module, guessed, ops)):
        probs = (module.lm_head(state_H) / 0.7).softmax(-1)
        expected = torch.zeros(29).index_copy(0, module.ids_V, probs)
        torch.testing.assert_close(proposal.probs_KV[step], expected, rtol=1e-4, atol=1e-6)


def test_temperature_zero_takes_arg_maxima_without_probabilities():
    module, ops, document, proposer = setup(vocab_size=11)
    extend(proposer, document, 0, 10)
    proposal = proposer.propose(1, 0.0, torch.Generator())
    states = unrolled(module, document, ops)
    assert proposal.probs_KV is None
    assert proposal.token_ids == (int(module.ids_V[module.lm_head(states[0]).argmax()]),)


def test_drawn_tokens_follow_their_probabilities():
    _, _, document, proposer = setup(vocab_size=11)
    extend(proposer, document, 0, 10)
    generator = torch.Generator().manual_seed(0)
    drawn = proposer.propose_all([proposer] * 2000, 1, 1.0, [generator] * 2000)
    share = torch.bincount(torch.tensor([p.token_ids[0] for p in drawn]), minlength=29) / len(drawn)
    assert (share - drawn[0].probs_KV[0]).abs().max() < 0.03
