"""A draft's vocabulary has two tokens at least: of one, nothing is learned, and its row has no deviation."""

import pytest
import torch

from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_dflash2.draft import DFlash2Draft
from spec_draft_dspark.draft import DSparkDraft
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_peagle.draft import PEagleDraft
from spec_kit.targets import read_target, read_target_tensors

DRAFTS = (Eagle3Draft, PEagleDraft, DFlashDraft, DFlash2Draft, DSparkDraft)


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_token_is_refused_in_one_line(draft):
    with pytest.raises(ConfigError, match=r"^draft: vocab_size=1: .* 2$"):
        validate(draft.Config, {"vocab_size": 1}, "draft")


@pytest.mark.parametrize("draft", DRAFTS)
def test_of_two_tokens_a_fresh_draft_is_finite(draft, make_target):
    target = read_target(make_target("qwen3", tie_word_embeddings=True))
    counts = torch.arange(target.vocab_size)
    options = {"vocab_size": 2} | ({"selector_top_k": 2} if draft is DFlash2Draft else {})
    small = draft(validate(draft.Config, options | {"layers": [2, 5]}, "draft"))
    module = small.build(target, read_target_tensors(target), counts)
    assert all(value.isfinite().all() for value in module.state_dict().values())
