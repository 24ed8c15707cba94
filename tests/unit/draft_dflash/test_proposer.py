"""A block of proposals is what the training forward says at the same place, with blocks as long as those drafted."""

from __future__ import annotations

import pytest
import torch

from spec_core.errors import ConfigError
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_kit.block_drafting import Blocks

from ..draft_parts import make_ops, make_target
from .cases import LLAMA3, make_batch, make_model, random_documents

KNOWN = 11
FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": {"num_layers": 2},
    "sliding": {"num_layers": 2, "sliding_window": 5},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 6},
}


def setup(num_tokens=4, block_size=5, **options):
    """A module, and for a block of ``num_tokens`` guesses the same weights in blocks of that size."""
    target = make_target(rope=LLAMA3, embedding_scale=2.0)
    config = DFlashConfig(block_size=block_size, **options)
    module, ops = make_model(target, config), make_ops(target)
    same_size = make_model(target, DFlashConfig(block_size=num_tokens + 1, **options))
    (document,) = random_documents(target, [KNOWN], seed=4)
    return same_size, ops, document, DFlashDraft(config).proposer(module, ops)


def extend(proposer, document, start, stop):
    """Positions start to stop, of which the last has no token behind it that the target has seen."""
    proposer.extend(document.ids[start + 1 : stop + 1].tolist(), document.states[start:stop])


def forward_logits(module, ops, document):
    """[B − 1, V]: the training forward, for the block whose anchor is the document's last token."""
    blocks = Blocks(torch.tensor([KNOWN - 1]), torch.tensor([0]), torch.tensor([1]))
    return module.states(make_batch([document], [0]), blocks, ops)[0, 1:] @ ops.head_VH.T


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[10], [1, 9], [3, 4, 10], list(range(1, 11))], ids=str)
def test_block_equals_the_training_forward(options, num_tokens, cuts):
    module, ops, document, proposer = setup(num_tokens, **options)
    generator = torch.Generator().manual_seed(0)
    for start, stop in zip([0, *cuts], [*cuts, 10], strict=False):
        if start < stop:
            extend(proposer, document, start, stop)
            proposal = proposer.propose(num_tokens, 0.7, generator)
    expected = (forward_logits(module, ops, document) / 0.7).softmax(-1)
    torch.testing.assert_close(proposal.probs_KV, expected, rtol=1e-4, atol=1e-6)
    greedy = proposer.propose(num_tokens, 0.0, generator)
    assert greedy.probs_KV is None
    assert greedy.token_ids == tuple(expected.argmax(-1).tolist())


def test_fewer_tokens_than_trained_run_a_shorter_block_as_in_the_engines():
    """Full layers look both ways: with fewer mask slots the first guess's distribution is another one."""
    _, _, document, proposer = setup(num_layers=2)
    extend(proposer, document, 0, 10)
    one, four = (proposer.propose(k, 1.0, torch.Generator().manual_seed(0)).probs_KV for k in (1, 4))
    assert not torch.allclose(one[0], four[0], rtol=1e-3)


def test_more_tokens_than_a_block_holds_are_refused_in_one_line():
    _, _, document, proposer = setup(num_layers=2)
    extend(proposer, document, 0, 10)
    with pytest.raises(
        ConfigError, match="num_tokens=5 asked of a draft with blocks of 5; it guesses at most 4"
    ):
        proposer.propose(5, 0.0, torch.Generator())


def test_layers_behind_the_drafts_own_are_ignored():
    """Soft targets capture one more state; the draft does not look at it."""
    _, _, document, proposer = setup(num_layers=2)
    _, _, _, other = setup(num_layers=2)
    extend(proposer, document, 0, 10)
    document.states = torch.cat([document.states, torch.randn(KNOWN, 1, 16)], dim=1)
    extend(other, document, 0, 10)
    assert other.propose(4, 0.0, torch.Generator()) == proposer.propose(4, 0.0, torch.Generator())


def test_drawn_tokens_follow_their_probabilities():
    _, _, document, proposer = setup(num_layers=1)
    extend(proposer, document, 0, 10)
    generator = torch.Generator().manual_seed(0)
    drawn = proposer.propose_all([proposer] * 2000, 2, 1.0, [generator] * 2000)
    for slot in range(2):
        counts = torch.bincount(torch.tensor([p.token_ids[slot] for p in drawn]), minlength=29)
        assert (counts / len(drawn) - drawn[0].probs_KV[slot]).abs().max() < 0.04
