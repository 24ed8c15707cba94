"""DFlash2Draft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from spec_draft_dflash2.candidate_draft import CandidateDraft
from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.shape import DFlash2Shape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spec_core import DraftConfig, TargetSpec
    from spec_core.records import ShardHints
    from spec_draft_dflash2.model import DFlash2Model
    from spec_draft_dflash2.proposer import DFlash2Proposer
    from spec_kit.drafting import Json


class DFlash2Draft(CandidateDraft[DFlash2Config, DFlash2Shape]):
    """DFlash2 (z-lab/dflash): DFlash with convolutions along a block and a selector of candidates.

    The selector makes each guess depend on the previous guess. See ``spec_core.draft`` for the contract.
    """

    name: ClassVar[str] = "dflash2"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = DFlash2Config
    Shape = DFlash2Shape
    architecture: ClassVar[str] = DFlash2Shape.architecture
    speculators_type: ClassVar[str] = "dflash2"
    speculators_architecture: ClassVar[str] = "DFlash2DraftModel"
    small_run: ClassVar[Mapping[str, object]] = {
        "block_size": 4,
        "num_layers": 2,
        "num_anchors": 64,
        "anchor_share": 1.0,
        "gamma": 2.0,  # the target accepts few guesses of a small draft
        "selector_top_k": 64,  # at a high temperature, 16 candidates hold too little of the distribution
    }
    default_block_size: ClassVar[int] = 8
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {
        "vllm": "dflash",
        "sglang": "DFLASH",
        "llamacpp": "draft-dflash",
    }

    def __init__(self, config: DraftConfig) -> None:
        """Make the draft and decide which engines can serve it.

        llama.cpp does only if all layers are full. The others take a candidate's row of a reduced vocabulary for its
        token.
        """
        super().__init__(config)
        methods = self.serving_methods.items()
        is_reduced = self.reduced(self.options.vocab_size)
        self.serving_methods = {
            name: method
            for name, method in methods
            if (self.looks_both_ways if name == "llamacpp" else not is_reduced)
        }

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields of a ``speculators`` folder, translated to the names and values that engines read."""
        served = super().speculators_fields(fields, folder)
        own = {name: fields[name] for name in cls.Shape.own_fields if name in fields}
        return {**served, cls.Shape.nested: own | served[cls.Shape.nested]}

    @classmethod
    def to_speculators(cls, served: Json) -> Json:
        """Return the fields that ``speculators_fields`` reads."""
        own = served[cls.Shape.nested]
        return {**super().to_speculators(served), **{name: own[name] for name in cls.Shape.own_fields}}

    def fresh_shape(self, target: TargetSpec) -> DFlash2Shape:
        """Return the shape of a new draft, from the options, their defaults and the target's sizes."""
        options = self.options
        return DFlash2Shape.for_target(
            options,
            target,
            vocab_size=options.vocab_size or target.vocab_size,
            conv_kernel_size=options.conv_kernel_size or 2,
            conv_group_size=options.conv_group_size or 16,
            selector_rank=options.selector_rank or 256,
            selector_top_k=options.selector_top_k or 16,
            **self.fresh_fields(target),
        )

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return the backbone's hints, and name the selector as a module with one row for each token."""
        return replace(super().shard_hints(target), vocabulary=("candidate_selector",))

    @classmethod
    def network(cls) -> tuple[type[DFlash2Model], type[DFlash2Proposer]]:
        """Return the class of the module and the class of its proposers, which import torch."""
        from spec_draft_dflash2.model import DFlash2Model
        from spec_draft_dflash2.proposer import DFlash2Proposer

        return DFlash2Model, DFlash2Proposer
