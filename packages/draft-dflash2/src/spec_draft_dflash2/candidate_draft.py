"""CandidateDraft is the base class of the package's draft plugins. This module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from spec_draft_dflash2.config import CandidateConfig
from spec_draft_dflash2.shape import CandidateShape
from spec_kit.block_drafting import BlockDraft

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import TargetSpec
    from spec_draft_dflash2.kernels import DFlash2Kernels

C = TypeVar("C", bound=CandidateConfig)
S = TypeVar("S", bound=CandidateShape)


class CandidateDraft(BlockDraft[C, S]):
    """A block draft whose first slot holds the last known token, and whose guesses are chosen among candidates."""

    default_block_size: ClassVar[int]
    """Number of slots of a fresh draft's blocks, if the options name none."""

    @property
    def block_size(self) -> int:
        """Number of slots of a block."""
        return self.options.block_size or self.default_block_size

    def fresh_fields(self, target: TargetSpec) -> dict[str, Any]:
        """Return fields of a fresh draft's shape.

        As in z-lab's published drafts, sliding layers look both ways inside a block, too.
        """
        causal = None if self.options.sliding_window is None else False
        return super().fresh_fields(target) | {"causal": causal, "block_size": self.block_size}

    @property
    def num_guesses(self) -> int:
        """Number of guesses of a block: its slots minus one."""
        return self.block_size - 1

    @property
    def guess_weights(self) -> Tensor:
        """Weight in the loss of each of the S guesses of a block, float64 [S]."""
        from spec_kit.block_drafting import guess_weights

        return guess_weights(self.num_guesses, self.options.gamma)

    @classmethod
    def kernels(cls) -> type[DFlash2Kernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_draft_dflash2.kernels import DFlash2Kernels

        return DFlash2Kernels
