"""Our drafts keep the contract of drafts, with every option that changes their tensors or their loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spec_core import Draft, TargetSpec
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_dflash2.draft import DFlash2Draft
from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft
from spec_draft_dspark.draft import DSparkDraft
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_mtp.draft import MtpDraft
from spec_draft_peagle.draft import PEagleDraft
from spec_testing import DraftSuite
from spec_testing.divided_step import SIZES, DividedStep, divided_steps
from spec_testing.toy_target import toy_target

from ..mtp_targets import write_config

LATENT = {
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

    @pytest.fixture(
        params=[
            {},
            {"vocab_size": 60, "num_layers": 2, "loss": "lk_lambda"}
            | dict.fromkeys(("norm_before_residual", "norm_before_fc", "qk_norm"), True),
            {"attention": "mla", **LATENT, "opd": True},
        ]
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        return {"num_steps": 3, **request.param}


class TestPEagleDraft(DraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return PEagleDraft

    @pytest.fixture(
        params=[
            {},
            {"segment_tokens": 5, "vocab_size": 40, "norm_before_residual": True, "norm_before_fc": True},
        ],
        ids=["whole", "segments"],
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Chains of as many guesses as the suite drafts, none of which is dropped."""
        return {"num_guesses": 3, "num_layers": 2, "retention": 1.0, **request.param}

    def supervised(self, last_known: int, position: int) -> list[int]:
        """A chain counts its guesses up to the first unsupervised token, so only the one that starts at
        ``last_known`` reaches ``position``."""
        return list(range(last_known + 1, last_known + position + 2))


class BlockDraftSuite(DraftSuite):
    def supervised(self, last_known: int, position: int) -> list[int]:
        """A block counts its guesses up to the first unsupervised token, so only the one that starts at
        ``last_known`` reaches ``position``."""
        return list(range(last_known, last_known + position + 2))


class TestDFlashDraft(BlockDraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return DFlashDraft

    @pytest.fixture(
        params=[
            {},
            {"num_layers": 1, "sliding_window": 4, "loss": "dpace"},
            {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4, "loss": "soft"},
            {"vocab_size": 60, "loss": "lk_lambda", "opd": True},
        ],
        ids=["full", "sliding", "mixed", "reduced"],
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks as long as what the suite drafts: engines run a block of the guesses and the last known token."""
        return {"block_size": 4, "num_layers": 2, "anchor_share": 1.0, **request.param}


class TestDFlash2Draft(BlockDraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return DFlash2Draft

    @pytest.fixture(
        params=[{}, {"ce_weight": 1.0, "soft_weight": 0.0}, {"vocab_size": 60, "opd": True}],
        ids=["soft", "ce", "reduced"],
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks of as many guesses as the suite drafts."""
        sizes = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
        return {"block_size": 4, "num_layers": 2, "anchor_share": 1.0, **sizes, **request.param}


class TestLiLiCorrDraft(BlockDraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return LiLiCorrDraft

    @pytest.fixture(
        params=[
            {"conv_group_size": 8},
            {"conv_kernel_size": 0, "margin_weight": 0.1, "soft_weight": 1.0, "opd": True},
        ],
        ids=["convolutions", "plain"],
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks of as many guesses as the suite drafts."""
        sizes = {"lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 8, "lilicorr_num_layers": 1}
        return {"block_size": 4, "num_layers": 2, "anchor_share": 1.0, **sizes, **request.param}


class TestDSparkDraft(BlockDraftSuite):
    @pytest.fixture
    def draft(self) -> type[Draft]:
        return DSparkDraft

    @pytest.fixture(
        params=[
            {},
            {"markov_head": "gated", "confidence_with_markov": False, "opd": True},
            {"markov_head": "rnn", "confidence": False},
            {"vocab_size": 60},
        ],
        ids=["vanilla", "gated", "rnn", "reduced"],
    )
    def options(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """Blocks of as many guesses as the suite drafts."""
        return {"block_size": 3, "num_layers": 2, "anchor_share": 1.0, "markov_rank": 8, **request.param}


class TestMtpDraft(DraftSuite):
    expresses: ClassVar[frozenset[str]] = frozenset({"one layer"})

    @pytest.fixture
    def draft(self) -> type[Draft]:
        return MtpDraft

    @pytest.fixture
    def options(self) -> dict[str, object]:
        return {"num_steps": 3}

    @pytest.fixture
    def others(self, target: TargetSpec) -> Mapping[str, Tensor]:
        return {target.norm_name: 1 + 0.1 * torch.rand(target.hidden_size)}


class TestMtpDraftWithExperts(TestMtpDraft):
    """A new head of the kind that the target's config.json describes."""

    @pytest.fixture(params=["qwen3_5_moe", "deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.slow)])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def target(self, tmp_path: Path, kind: str) -> TargetSpec:
        target = toy_target(tmp_path / "target")
        write_config(kind, target)
        return target

    @pytest.fixture
    def division(
        self,
        draft: type[Draft],
        options: dict[str, object],
        others: Mapping[str, Tensor],
        tmp_path: Path,
        kind: str,
    ) -> list[DividedStep]:
        write_config(kind, toy_target(tmp_path, **SIZES))
        return divided_steps(draft, options, others, tmp_path)
