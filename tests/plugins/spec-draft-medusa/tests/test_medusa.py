"""The draft keeps the contract of drafts: three fixtures and one subclass say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from spec_draft_medusa import cpu
from spec_draft_medusa.draft import MedusaDraft
from spec_draft_medusa.kernels import MedusaKernels
from spec_draft_medusa.model import Block
from torch.nn import functional as F

from spec_testing import DraftSuite, reference_kernel

if TYPE_CHECKING:
    from spec_core import Draft


class TestDraft(DraftSuite):
    expresses: ClassVar[frozenset[str]] = frozenset({"one layer"})

    @pytest.fixture
    def draft(self) -> type[Draft]:
        return MedusaDraft


def test_the_kernel_for_cpus_is_found_and_used(monkeypatch):
    calls, kernel = [], cpu.medusa_residual
    monkeypatch.setattr(cpu, "medusa_residual", lambda *args: calls.append(args) or kernel(*args))
    block, x = Block(4, MedusaKernels.of(reference_kernel)), torch.randn(2, 4)
    torch.testing.assert_close(block(x), x + F.silu(block.layers[0](x)))
    assert len(calls) == 1
