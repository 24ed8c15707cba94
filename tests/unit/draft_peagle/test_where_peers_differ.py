"""Trainers of P-EAGLE differ in these points; each test says whose behaviour ours is, and why."""

import json

import pytest
import torch

from spec_core.errors import ArtifactError
from spec_core.records import Supervision
from spec_draft_peagle.chains import ChainRule
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.draft import PEagleDraft

from ..draft_batches import random_documents, step_arguments
from ..draft_parts import make_target
from .cases import make_config, make_model

DOCUMENT = torch.tensor([False, False, True, True, True])


def lengths(mask_T: torch.Tensor) -> list[int]:
    rule = ChainRule(num_guesses=3, retention=1.0, least_retention=0.0)
    return rule.draw(Supervision(sample_id=0, epoch=0, loss_mask=mask_T))[0].tolist()


def test_a_guess_counts_by_the_mask_of_the_guessed_token():
    """Ours. speculators masks by the row's own input token, one before: it trains the token behind an answer, and not
    the answer's first one, which the engine does ask for."""
    assert lengths(DOCUMENT) == [3, 2, 1, 0]


def test_a_chain_begins_where_its_first_guess_counts():
    """SpecForge's, which wants an element's row in the document. speculators wants only the element itself to be
    supervised, so that the first one of a document belongs to a chain at row −1, which is another document's end."""
    assert all(row >= 0 for row, n in enumerate(lengths(torch.ones(5, dtype=torch.bool))) if n)
    assert lengths(torch.tensor([False, False, False, True, True])) == [
        0,
        2,
        1,
        0,
    ]  # row 0 would reach token 3


def test_every_counted_guess_weighs_the_same():
    """All three: no decay by depth, one mean over all of them; Eagle3's steps are a mean each."""
    target, config = make_target(), make_config(retention=0.5)
    documents = random_documents(target, [30, 20], 1, dtype=torch.float64)
    module = make_model(target, config, torch.float64)
    output = module(*step_arguments(PEagleDraft(config), target, documents))
    counted = output.counts["guess_loss"].sum()
    assert output.loss.item() == pytest.approx((output.sums["guess_loss"].sum() / counted).item(), rel=1e-12)


def test_loss_is_the_cross_entropy_whose_gradient_is_that_of_kl():
    """SpecForge's. speculators and Automodel report KL, less by the teacher's entropy: a constant of the draft."""
    assert PEagleConfig().loss == "ce"
    target, documents = make_target(), random_documents(make_target(), [12], 2, dtype=torch.float64)
    config = make_config()
    module = make_model(target, config, torch.float64)
    output = module(*step_arguments(PEagleDraft(config), target, documents))
    output.loss.backward()
    # The gradient of either sums to 0 over the vocabulary, for every guess: Σ (q − p) = 0.
    assert module.lm_head.weight.grad.sum(0).abs().max() < 1e-12


def test_guess_trains_where_the_targets_choice_is_in_the_vocabulary():
    """SpecForge's, and our Eagle3's. speculators trains every row towards what the reduced vocabulary has of it."""
    target, config = make_target(), make_config(vocab_size=5)
    documents = random_documents(target, [40], 3, dtype=torch.float64)
    module = make_model(target, config, torch.float64)
    batch, counts, ops = step_arguments(PEagleDraft(config), target, documents)
    best_T = ops.teacher_logits(batch.hidden_TNH[:, -1]).argmax(-1)
    assert not module.t2d[best_T].all()
    batch.hidden_TNH[module.t2d[best_T], -1] = batch.hidden_TNH[~module.t2d[best_T]][0, -1]
    output = module(batch, counts, ops)
    output.loss.backward()
    assert output.loss.item() == 0
    assert output.counts["accuracy"].sum() > 0


def test_defaults_are_those_that_most_have():
    """Layers: all published drafts' 4; depth and least share: speculators' 8 and 0.2; share: speculators' 0.7, where
    SpecForge and Automodel keep 0.8."""
    config = PEagleConfig()
    assert (config.num_guesses, config.retention, config.least_retention) == (8, 0.7, 0.2)
    assert PEagleDraft(config).shape(make_target()).num_layers == 4


def test_mask_token_is_written_where_vllm_looks(tmp_path):
    """Ours. SpecForge's config.json has none, so that vLLM refuses it; ours says what is missing."""
    target = make_target()
    fields = PEagleDraft(make_config()).exported_config(target)
    assert fields["pard_token"] == PEagleDraft(make_config()).shape(target).mask_token_id
    del fields["pard_token"]
    fields["architectures"] = ["PEagleDraftModel"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ArtifactError, match="pard_token"):
        PEagleDraft.from_folder(tmp_path)


def test_embedding_stays_the_targets():
    """Ours, and speculators' command; its configuration class, and SpecForge, train a copy."""
    module = make_model(make_target(), make_config())
    assert not any("embed" in name for name, _ in module.named_parameters())
