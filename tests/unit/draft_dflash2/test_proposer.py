"""Proposals are those of the training forward over the tokens that were drawn, one guess after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_core.errors import ConfigError
from spec_draft_dflash2.convolution import BlockConvolution
from spec_draft_dflash2.draft import DFlash2Draft
from spec_kit.block_drafting import Blocks

from ..draft_dflash.cases import LLAMA3, make_batch, random_documents
from ..draft_parts import make_ops, make_target, make_tensors
from .cases import make_config, make_model

KNOWN = 11


def setup(num_tokens=3):
    """A module in blocks of ``num_tokens`` guesses, and a proposer of the same weights in blocks of three."""
    target, config = make_target(rope=LLAMA3, embedding_scale=2.0), make_config(block_size=4)
    module, ops = make_model(target, config), make_ops(target)
    same_size = make_model(target, make_config(block_size=num_tokens + 1))
    (document,) = random_documents(target, [KNOWN + 20], 4, 6)
    return same_size, ops, document, DFlash2Draft(config).proposer(module, ops)


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
    states_KH = module.states(make_batch([extended], [0]), blocks, ops)[0, 1:]
    logits_KV, selector = states_KH @ ops.head_VH.T, module.candidate_selector
    context_Kr = selector.context(states_KH, ids[KNOWN - 1 : -1])
    score_KV = logits_KV + context_Kr @ selector.successor_codebook.T
    last_K1 = logits_KV.sort(-1, descending=True).values[:, module.shape.selector_top_k - 1, None]
    return (score_KV.masked_fill(logits_KV < last_K1, -torch.inf) / temperature).softmax(-1)


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("cuts", [[10], [1, 9], list(range(1, 11))], ids=str)
def test_guesses_equal_the_training_forward_over_what_was_drawn(num_tokens, cuts):
    """The distribution that each guess comes with is the selector's: rejection sampling relies on it."""
    module, ops, document, proposer = setup(num_tokens)
    generator = torch.Generator().manual_seed(0)
    for start, stop in zip([0, *cuts], [*cuts, 10], strict=False):
        if start < stop:
            extend(proposer, document, start, stop)
    drawn = proposer.propose(num_tokens, 0.7, generator)
    expected = forward_probs(module, ops, document, drawn.token_ids, 0.7)
    torch.testing.assert_close(drawn.probs_KV, expected, rtol=1e-4, atol=1e-6)
    assert (drawn.probs_KV > 0).sum(-1).tolist() == [5] * num_tokens
    greedy = proposer.propose(num_tokens, 0.0, generator)
    assert greedy.probs_KV is None
    expected = forward_probs(module, ops, document, greedy.token_ids, 1.0)
    assert greedy.token_ids == tuple(expected.argmax(-1).tolist())


def test_a_guess_depends_on_the_one_before():
    _, _, document, proposer = setup()
    extend(proposer, document, 0, 10)
    seen = {}
    for seed in range(60):
        drawn = proposer.propose(2, 3.0, torch.Generator().manual_seed(seed))
        seen.setdefault(drawn.token_ids[0], drawn.probs_KV[1])
    first, *others = seen.values()
    assert any(not torch.allclose(first, other, rtol=1e-2) for other in others)


def test_more_tokens_than_a_block_holds_are_refused_in_one_line():
    _, _, document, proposer = setup()
    extend(proposer, document, 0, 10)
    with pytest.raises(
        ConfigError, match="num_tokens=4 asked of a draft with blocks of 4; it guesses at most 3"
    ):
        proposer.propose(4, 0.0, torch.Generator())


def test_a_fresh_drafts_layers_are_dflashs(monkeypatch):
    """The convolutions start as the identity: without them the states are the same."""
    target, config = make_target(), make_config()
    torch.manual_seed(0)
    module = DFlash2Draft(config).build(target, make_tensors(target), None)
    (document,) = random_documents(target, [12], 4, 6)
    blocks = Blocks(*torch.tensor([[9], [0], [1]]))
    arguments = make_batch([document], [0]), blocks, make_ops(target)
    states = module.states(*arguments)
    monkeypatch.setattr(BlockConvolution, "forward", lambda _, x, sublayer: sublayer(x))
    torch.testing.assert_close(module.states(*arguments), states, rtol=1e-6, atol=1e-6)
