"""Tiny drafts for the DSpark tests, in ours and the dense reference's terms; targets and documents are DFlash's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_draft_dspark.config import DSparkConfig
from spec_draft_dspark.draft import DSparkDraft
from spec_kit.block_drafting import BlockRule

from ..draft_dflash.cases import setting_of, supervision
from ..draft_parts import enlarge, make_tensors
from .dense_reference import Heads

if TYPE_CHECKING:
    from spec_core import TargetSpec

    from ..draft_dflash.dense_reference import Document, Setting

RANK = 6


def make_config(**options) -> DSparkConfig:
    return DSparkConfig(
        **{"block_size": 4, "num_layers": 2, "num_anchors": 6, "markov_rank": RANK, **options}
    )


def make_model(target: TargetSpec, config: DSparkConfig, dtype: torch.dtype = torch.float32):
    """A draft whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    module = DSparkDraft(config).build(target, make_tensors(target), None)
    return enlarge(module, "_head.").to(dtype)


def denominators(config: DSparkConfig, documents: list[Document]) -> torch.Tensor:
    return DSparkDraft(config).denominators(supervision(documents))


def give_anchors(config: DSparkConfig, documents: list[Document]) -> None:
    """Hands the drawn anchors to the dense reference."""
    rule = BlockRule(config.num_anchors, config.block_size)
    for document, sample in zip(documents, supervision(documents), strict=True):
        document.anchors = rule.draw(sample)[0].tolist()


def make_setting(target: TargetSpec, module, dtype: torch.dtype) -> Setting:
    shape = module.shape
    return setting_of(target, shape, dtype, block_size=shape.block_size, gamma=module.config.gamma)


def make_parts(module) -> Heads:
    config, shape = module.config, module.shape
    return Heads(
        markov=shape.markov_head,
        confidence=shape.confidence,
        with_markov=shape.confidence_with_markov,
        gamma=config.gamma,
        ce=config.ce_weight,
        l1=config.l1_weight,
        bce=config.confidence_weight,
    )
