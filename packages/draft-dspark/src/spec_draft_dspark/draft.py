"""DSparkDraft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from spec_draft_dspark.config import DSparkConfig
from spec_draft_dspark.shape import ARCHITECTURE, OWN_FIELDS, DSparkShape, speculators_fields
from spec_kit.block_drafting import BlockDraft
from spec_kit.drafting import architectures

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core import DraftConfig, TargetSpec
    from spec_draft_dspark.model import DSparkModel
    from spec_draft_dspark.proposer import DSparkProposer
    from spec_kit.drafting import Json

_SPECFORGE = "DSparkDraftModel"


class DSparkDraft(BlockDraft[DSparkConfig, DSparkShape]):
    """DSpark (arXiv 2607.05147), which guesses a block of tokens in one pass, with a Markov head.

    The Markov head makes each guess depend on the previous guess. See ``spec_core.draft`` for the contract.
    """

    name: ClassVar[str] = "dspark"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = DSparkConfig
    Shape = DSparkShape
    architecture: ClassVar[str] = ARCHITECTURE
    speculators_type: ClassVar[str] = "dspark"
    speculators_architecture: ClassVar[str] = "DSparkDraftModel"
    may_copy_head: ClassVar[bool] = True  # folders of DeepSpec have a copy
    small_run: ClassVar[Mapping[str, object]] = {
        "block_size": 3,
        "num_layers": 2,
        "num_anchors": 64,
        "anchor_share": 1.0,
        "gamma": 2.0,  # the target accepts few guesses of a small draft
    }
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {
        "vllm": "dspark",
        "sglang": "DSPARK",
        "llamacpp": "draft-dspark",
    }

    def __init__(self, config: DraftConfig) -> None:
        """Make the draft and decide which engines can serve it.

        Only SGLang serves a Markov head that is not ``vanilla``. It takes the target's whole head for a block draft.
        llama.cpp serves only full layers that look both ways.
        """
        super().__init__(config)
        other_head = self.options.markov_head not in (None, "vanilla")
        is_reduced = self.reduced(self.options.vocab_size)
        unable = {"sglang": is_reduced, "vllm": other_head}
        unable["llamacpp"] = other_head or not self.looks_both_ways
        self.serving_methods = {
            name: method for name, method in self.serving_methods.items() if not unable[name]
        }

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether config.json describes a DSpark draft, under DeepSpec's or SpecForge's name."""
        return not architectures(fields).isdisjoint({ARCHITECTURE, _SPECFORGE})

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields of a ``speculators`` folder, translated to the names and values that engines read."""
        served = super().speculators_fields(fields, folder)
        return {**served, cls.Shape.nested: speculators_fields(fields) | served[cls.Shape.nested]}

    @classmethod
    def to_speculators(cls, served: Json) -> Json:
        """Return the fields that ``speculators_fields`` reads."""
        heads = {name: served[name] for name in (*OWN_FIELDS, "sample_from_anchor")}
        return {**super().to_speculators(served), **heads}

    def fresh_shape(self, target: TargetSpec) -> DSparkShape:
        """Return the shape of a new draft, from the options, DeepSpec's defaults and the target's sizes."""
        options = self.options
        confidence = options.confidence is not False
        return DSparkShape.for_target(
            options,
            target,
            block_size=options.block_size or 7,
            sample_from_anchor=options.sample_from_anchor is not False,
            vocab_size=options.vocab_size or target.vocab_size,
            markov_head=options.markov_head or "vanilla",
            markov_rank=options.markov_rank or 256,
            confidence=confidence,
            confidence_with_markov=confidence and options.confidence_with_markov is not False,
            **self.fresh_fields(target),
        )

    @property
    def num_guesses(self) -> int:
        """Number of guesses of a block: one for each slot, of which the first may make none."""
        return (self.options.block_size or 7) - (self.options.sample_from_anchor is False)

    @property
    def guess_weights(self) -> Tensor:
        """Weight in the loss of each of the S guesses of a block, float64 [S]."""
        from spec_kit.block_drafting import guess_weights

        return guess_weights(self.num_guesses, self.options.gamma)

    @classmethod
    def network(cls) -> tuple[type[DSparkModel], type[DSparkProposer]]:
        """Return the class of the module and the class of its proposers, which import torch."""
        from spec_draft_dspark.model import DSparkModel
        from spec_draft_dspark.proposer import DSparkProposer

        return DSparkModel, DSparkProposer
