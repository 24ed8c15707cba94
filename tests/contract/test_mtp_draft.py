"""The MTP draft keeps the contract of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from spec_draft_mtp.draft import MtpDraft
from spec_testing import DraftSuite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from spec_core import Draft, TargetSpec


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
