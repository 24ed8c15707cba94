"""Check a chain of proposals against the unrolled training forward with the proposals as its tokens."""

import torch

from spec_draft_eagle3.draft import Eagle3Draft

from ..block_proposals import extend
from ..dense_parts import Document
from ..draft_batches import make_batch
from ..draft_parts import make_ops
from .cases import make_model

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
