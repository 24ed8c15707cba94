"""Define DSparkShape: a DSpark draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from spec_core import TargetSpec
from spec_draft_dspark.config import MarkovKind
from spec_kit.block_drafting import BlockShape
from spec_kit.drafting import Json, Shapes, Size
from spec_kit.sharding import TensorParallelHints

ARCHITECTURE = "Qwen3DSparkModel"
OWN_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


class DSparkShape(BlockShape):
    """The sizes of one DSpark draft."""

    block_size: Size
    sample_from_anchor: bool = True
    markov_head: MarkovKind = Field("vanilla", alias="markov_head_type")
    markov_rank: Size
    confidence: bool = Field(False, alias="enable_confidence_head")
    confidence_with_markov: bool = Field(False, alias="confidence_head_with_markov")
    """Whether the confidence head also reads the previous token's embedding. vLLM takes this option and
    ``enable_confidence_head`` as false if config.json lacks them."""

    @property
    def num_guesses(self) -> int:
        """Number of guesses of a block. The first slot may make none."""
        return self.block_size - (not self.sample_from_anchor)

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor of the backbone and the heads."""
        h, r = self.hidden_size, self.markov_rank
        heads: Shapes = {
            "markov_head.markov_w1.weight": (self.target_vocab_size, r),
            "markov_head.markov_w2.weight": (self.vocab_size, r),
        }
        if self.markov_head == "gated":
            heads |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
        if self.markov_head == "rnn":
            heads |= {
                "markov_head.joint_proj.weight": (3 * r, 2 * r + h),
                "markov_head.joint_proj.bias": (3 * r,),
            }
        if self.confidence:
            inputs = h + r * self.confidence_with_markov
            heads |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
        return super().tensor_shapes() | heads

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the draft.

        Among the heads, only W2 is divided, by vocabulary rows.
        """
        hints = super().parallel_hints()
        return replace(hints, columns={**hints.columns, "markov_head.markov_w2": self.vocab_size})

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the backbone's fields, and the heads' fields from the nested section ``own``."""
        keys = (*OWN_FIELDS, "sample_from_anchor")
        return super().read_own(fields, own, folder) | {key: own[key] for key in keys if key in own}

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "projector_type": "dspark",
            "attention_mode": "gqa",
        }

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        return super().problem() if self.num_guesses else "block_size=1 leaves no slot to guess"

    def to_json(self, target: TargetSpec) -> Json:
        """Return DeepSpec's fields of config.json, which vLLM from 0.26 on and SGLang from 0.5.16 on read.

        ``target_layer_ids`` is written twice: vLLM 0.26 gets the size of ``fc`` right only from ``dflash_config``,
        which both engines read first; other programs read the top level. Index i means the output of target layer i.
        """
        return {
            **self.backbone_fields(ARCHITECTURE, target, tied=False),
            "block_size": self.block_size,
            "sample_from_anchor": self.sample_from_anchor,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.output_ids,
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence_with_markov,
            "dflash_config": self.nested_fields,
        }


def speculators_fields(fields: Json) -> Json:
    """Return the heads' fields of a ``speculators`` folder.

    ``sample_from_anchor`` is false if the folder lacks it: a block then makes one guess less than it has
    slots.
    """
    found = {key: fields[key] for key in OWN_FIELDS if key in fields}
    return {"sample_from_anchor": False, **found}
