"""The draft keeps the contract of drafts: three fixtures and one subclass say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from spec_draft_medusa.draft import MedusaDraft

from spec_testing import DraftSuite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from spec_core import Draft, TargetSpec


class TestDraft(DraftSuite):
    expresses: ClassVar[frozenset[str]] = frozenset({"one layer"})

    @pytest.fixture
    def draft(self) -> type[Draft]:
        return MedusaDraft

    @pytest.fixture
    def others(self, target: TargetSpec) -> Mapping[str, Tensor]:
        return {target.norm_name: torch.ones(target.hidden_size)}
