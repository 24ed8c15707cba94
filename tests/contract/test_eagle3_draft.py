"""Eagle3 keeps the contract of drafts, plain and with every option that changes its tensors or its loss."""

import pytest

from spec_core import Draft
from spec_draft_eagle3.draft import Eagle3Draft
from spec_testing import DraftSuite

MLA = {
    "attention": "mla",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


class TestEagle3Draft(DraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return Eagle3Draft

    @pytest.fixture(params=[{}, {"vocab_size": 60, "num_layers": 2, "loss": "lk_lambda"}, MLA])
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        return {"num_steps": 3, **request.param}
