"""The MTP draft keeps the contract of drafts."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spec_core import Draft, TargetSpec
from spec_draft_mtp.draft import MtpDraft
from spec_testing import DraftSuite
from spec_testing.divided_step import SIZES, DividedStep, divided_steps
from spec_testing.toy_target import toy_target

from ..mtp_targets import write_config


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

    @pytest.fixture(params=["qwen3_5_moe", "deepseek_v3", "glm4_moe"])
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
