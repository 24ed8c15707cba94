"""Fresh drafts of every algorithm guess without being sure, whatever the target's scales are."""

import math

import pytest
import torch

from spec_core import TargetTensors
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.draft import DFlash2Draft
from spec_draft_dspark.config import DSparkConfig
from spec_draft_dspark.draft import DSparkDraft
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.draft import PEagleDraft
from spec_kit.block_drafting import BlockDraft
from spec_kit.layers import TargetOps
from spec_kit.layers.initial_weights import first_norm

from ...draft_batches import denominators, make_batch, random_documents
from ...draft_parts import CPU, make_target

VOCAB, WIDTH = 8192, 576
DRAFTS = {
    "eagle3": (Eagle3Draft, Eagle3Config(num_steps=3), "step_loss"),
    "peagle": (PEagleDraft, PEagleConfig(num_guesses=3, num_layers=2, mask_token_id=9), "guess_loss"),
    "dflash": (
        DFlashDraft,
        DFlashConfig(block_size=4, num_layers=2, num_anchors=128, mask_token_id=9),
        "slot_loss",
    ),
    "dflash2": (
        DFlash2Draft,
        DFlash2Config(block_size=4, num_layers=2, mask_token_id=9, ce_weight=1.0, soft_weight=0.0),
        "head_loss",
    ),
    "dspark": (
        DSparkDraft,
        DSparkConfig(
            block_size=3, num_layers=2, num_anchors=128, mask_token_id=9, ce_weight=1.0, l1_weight=0.0
        ),
        "guess_loss",
    ),
}


def realistic_tensors(target) -> TargetTensors:
    """Rows of unequal norms, and unequal weights of the final norm, as trained ones are."""
    generator = torch.Generator().manual_seed(3)
    tables = [draw_table(generator) for _ in range(1 if target.tied else 2)]
    return TargetTensors(
        embedding_VH=tables[0], head_VH=tables[-1], norm_H=1.8 + 0.4 * torch.randn(WIDTH, generator=generator)
    )


def draw_table(generator) -> torch.Tensor:
    size_V1 = torch.exp(0.25 * torch.randn(VOCAB, 1, generator=generator))
    return size_V1 * 0.14 * torch.randn(VOCAB, WIDTH, generator=generator)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_first_loss_is_about_that_of_equal_probabilities(name, tied):
    algorithm, config, metric = DRAFTS[name]
    head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    target = make_target(vocab_size=VOCAB, hidden_size=WIDTH, head_name=head_name)
    tensors, draft = realistic_tensors(target), algorithm(config)
    torch.manual_seed(0)
    module = draft.build(target, tensors, None)
    states = len(draft.required_features(target).layers)
    documents = random_documents(target, [100] * 4, seed=1, num_states=states)
    ops = TargetOps(target, tensors, CPU, torch.float32)
    output = module(make_batch(documents, [0] * 4), denominators(draft, documents), ops)
    losses = output.metrics()[metric]
    assert len(losses) == 3
    # Blocks begin with the embedding of the mask token, at which a tied head points.
    most = 1.25 if tied and isinstance(draft, BlockDraft) else 1.02
    assert sum(losses) / 3 <= most * math.log(VOCAB)


def test_a_norm_with_unsure_guesses_stays_the_targets():
    norm_H, head_VH = torch.tensor([1.0, 2.0]), 0.01 * torch.randn(9000, 2)
    assert torch.equal(first_norm(norm_H, head_VH), norm_H)
    assert torch.equal(first_norm(norm_H, torch.zeros(5, 2)), norm_H)


@pytest.mark.parametrize(("width", "deviation"), [(64, 1.5), (1024, 0.5)])
def test_logits_of_random_states_have_the_named_deviation(width, deviation):
    generator = torch.Generator().manual_seed(0)
    norm_H, head_VH = (
        1 + torch.rand(width, generator=generator),
        torch.randn(9000, width, generator=generator) + 3,
    )
    states = torch.randn(200, width, generator=generator)
    logits = states * first_norm(norm_H, head_VH) @ head_VH.T
    assert logits.std(1).mean().item() == pytest.approx(deviation, rel=0.05)
