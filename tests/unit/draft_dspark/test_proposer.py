"""Proposals are those of the training forward over the tokens that were drawn, one guess after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_core.errors import ConfigError
from spec_draft_dspark.draft import DSparkDraft
from spec_kit.block_drafting import Blocks

from ..draft_dflash.cases import LLAMA3, make_batch, random_documents
from ..draft_parts import make_ops, make_target
from .cases import make_config, make_model

KNOWN = 11
HEADS = ["vanilla", "gated", "rnn"]


def setup(head, guesses=4, num_tokens=4):
    """A module, and for a block of ``num_tokens`` guesses the same weights in blocks of that size."""
    target = make_target(rope=LLAMA3, embedding_scale=2.0)
    config = make_config(block_size=guesses, markov_head=head)
    module, ops = make_model(target, config), make_ops(target)
    same_size = make_model(target, make_config(block_size=num_tokens, markov_head=head))
    (document,) = random_documents(target, [KNOWN + 20], 4, 6)
    return same_size, ops, document, DSparkDraft(config).proposer(module, ops)


def extend(proposer, document, start, stop):
    """Positions start to stop, of which the last has no token behind it that the target has seen."""
    proposer.extend(document.ids[start + 1 : stop + 1].tolist(), document.states[start:stop])


def forward_probs(module, ops, document, guesses, temperature):
    """[K, V]: the training forward over the known tokens and then ``guesses``, the anchor at the last known one."""
    ids = torch.cat([document.ids[:KNOWN], torch.tensor(guesses)])
    extended = replace(
        document, ids=ids, states=document.states[: len(ids)], mask=torch.ones(len(ids)).bool()
    )
    blocks = Blocks(torch.tensor([KNOWN - 1]), torch.tensor([0]), torch.tensor([1]))
    batch = make_batch([extended], [0])
    before_AS = ids[KNOWN - 1 : -1][None]
    inputs = module.head_inputs(module.states(batch, blocks, ops), before_AS)
    logits_KV = inputs.states_ASH[0] @ ops.head_VH.T + inputs.bias_ASr[0] @ inputs.bias_Vr.T
    return (logits_KV / temperature).softmax(-1)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[10], [1, 9], list(range(1, 11))], ids=str)
def test_guesses_equal_the_training_forward_over_what_was_drawn(head, num_tokens, cuts):
    """The distribution that each guess comes with includes the bias: rejection sampling relies on it."""
    module, ops, document, proposer = setup(head, num_tokens=num_tokens)
    generator = torch.Generator().manual_seed(0)
    for start, stop in zip([0, *cuts], [*cuts, 10], strict=False):
        if start < stop:
            extend(proposer, document, start, stop)
    drawn = proposer.propose(num_tokens, 0.7, generator)
    expected = forward_probs(module, ops, document, drawn.token_ids, 0.7)
    torch.testing.assert_close(drawn.probs_KV, expected, rtol=1e-4, atol=1e-6)
    greedy = proposer.propose(num_tokens, 0.0, generator)
    assert greedy.probs_KV is None
    expected = forward_probs(module, ops, document, greedy.token_ids, 1.0)
    assert greedy.token_ids == tuple(expected.argmax(-1).tolist())


@pytest.mark.parametrize("head", HEADS)
def test_a_guess_depends_on_the_one_before(head):
    _, _, document, proposer = setup(head)
    extend(proposer, document, 0, 10)
    seen = {}
    for seed in range(60):
        drawn = proposer.propose(2, 3.0, torch.Generator().manual_seed(seed))
        seen.setdefault(drawn.token_ids[0], drawn.probs_KV[1])
    first, *others = seen.values()
    assert any(not torch.allclose(first, other, rtol=1e-2) for other in others)


def test_more_tokens_than_a_block_holds_are_refused_in_one_line():
    _, _, document, proposer = setup("vanilla")
    extend(proposer, document, 0, 10)
    with pytest.raises(
        ConfigError, match="num_tokens=5 asked of a draft with blocks of 4; it guesses at most 4"
    ):
        proposer.propose(5, 0.0, torch.Generator())


def test_drawn_tokens_follow_their_probabilities():
    """Pairs of guesses: the chance of the second is the one after the first."""
    _, _, document, proposer = setup("rnn")
    extend(proposer, document, 0, 10)
    generator, counts, chances = torch.Generator().manual_seed(0), torch.zeros(29, 29), torch.zeros(29, 29)
    rounds = 1000
    for drawn in proposer.propose_all([proposer] * rounds, 2, 1.0, [generator] * rounds):
        one, two = drawn.token_ids
        counts[one, two] += 1
        chances[one] = drawn.probs_KV[0, one] * drawn.probs_KV[1]
    assert (counts / rounds - chances).abs().max() < 0.03
