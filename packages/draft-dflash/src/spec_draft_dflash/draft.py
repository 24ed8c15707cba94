"""DFlashDraft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from spec_core.errors import ArtifactError
from spec_draft_dflash.config import SOFT_LOSSES, DFlashConfig
from spec_draft_dflash.shape import ARCHITECTURE, DFlashShape
from spec_kit.block_drafting import BlockDraft
from spec_kit.drafting import DraftCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from spec_core import DraftConfig, TargetSpec
    from spec_draft_dflash.kernels import DFlashKernels
    from spec_draft_dflash.model import DFlashModel
    from spec_draft_dflash.proposer import DFlashProposer

_MASK_FILE = "mask_embedding.pt"


class DFlashDraft(BlockDraft[DFlashConfig, DFlashShape]):
    """DFlash (arXiv 2602.06036), which guesses a block of tokens in one pass.

    See ``spec_core.draft`` for the contract.
    """

    name: ClassVar[str] = "dflash"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = DFlashConfig
    Shape = DFlashShape
    architecture: ClassVar[str] = ARCHITECTURE
    speculators_type: ClassVar[str] = "dflash"
    speculators_architecture: ClassVar[str] = "DFlashDraftModel"
    small_run: ClassVar[Mapping[str, object]] = {
        "block_size": 4,
        "num_layers": 3,
        "num_anchors": 128,
        "anchor_share": 1.0,
        "loss": "soft",  # with little data, the target's distribution teaches more than the one token of the data
        "gamma": 1.0,  # the target accepts few guesses of a small draft
    }
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {
        "vllm": "dflash",
        "sglang": "DFLASH",
        "llamacpp": "draft-dflash",
    }

    def __init__(self, config: DraftConfig) -> None:
        """Make the draft and decide which engines can serve it.

        SGLang takes the target's whole head for a block draft. llama.cpp serves only full layers that look both ways.
        """
        super().__init__(config)
        unable = {
            "sglang": self.reduced(self.options.vocab_size),
            "llamacpp": not self.looks_both_ways,
        }
        self.serving_methods = {
            name: method for name, method in self.serving_methods.items() if not unable.get(name)
        }

    @classmethod
    def check_checkpoint(cls, checkpoint: DraftCheckpoint[DFlashShape]) -> None:
        """Raise ArtifactError if the folder stores a mask vector that is not the embedding of a token."""
        if (checkpoint.folder / _MASK_FILE).exists():
            raise ArtifactError(
                f"draft {checkpoint.folder} has a {_MASK_FILE}; only a token's own embedding can be the mask"
            )

    def fresh_shape(self, target: TargetSpec) -> DFlashShape:
        """Return the shape of a new draft, from the options, the paper's defaults and the target's sizes."""
        options = self.options
        fields = self.fresh_fields(target)
        own = {
            "layer_types": options.layer_types or fields["layer_types"],
            "block_size": self._block_size,
            "vocab_size": options.vocab_size or target.vocab_size,
        }
        return DFlashShape.for_target(options, target, **{**fields, **own})

    @property
    def num_guesses(self) -> int:
        """Number of guesses of a block: its slots minus one."""
        return self._block_size - 1

    @property
    def guess_weights(self) -> Tensor:
        """Weight in the loss of each of the S guesses of a block, float64 [S].

        With ``dpace`` each weight is 1, because this loss computes its own weights.
        """
        from spec_kit.block_drafting import guess_weights

        weight_S = guess_weights(self.num_guesses, self.options.decay(self._block_size))
        return weight_S.new_ones(len(weight_S)) if self.options.loss == "dpace" else weight_S

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss compares guesses with the target's distributions."""
        return self.options.loss in SOFT_LOSSES or self.options.opd

    @classmethod
    def kernels(cls) -> type[DFlashKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_draft_dflash.kernels import DFlashKernels

        return DFlashKernels

    @classmethod
    def network(cls) -> tuple[type[DFlashModel], type[DFlashProposer]]:
        """Return the class of the module and the class of its proposers, which import torch."""
        from spec_draft_dflash.model import DFlashModel
        from spec_draft_dflash.proposer import DFlashProposer

        return DFlashModel, DFlashProposer

    @property
    def _block_size(self) -> int:
        return self.options.block_size or 16
