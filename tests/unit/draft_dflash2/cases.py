"""Tiny drafts for the DFlash2 tests, in ours and the dense reference's terms; targets and documents are DFlash's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.draft import DFlash2Draft
from spec_kit.block_drafting import BlockRule

from ..draft_dflash.cases import setting_of, supervision
from ..draft_parts import enlarge, make_tensors
from .dense_reference import Selector

if TYPE_CHECKING:
    from spec_core import TargetSpec

    from ..draft_dflash.dense_reference import Document, Setting

SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def make_config(**options) -> DFlash2Config:
    return DFlash2Config(**{"block_size": 4, "num_layers": 2, "num_anchors": 6, **SIZES, **options})


def make_model(target: TargetSpec, config: DFlash2Config, dtype: torch.dtype = torch.float32):
    """A draft whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    module = DFlash2Draft(config).build(target, make_tensors(target), None)
    return enlarge(module, "selector.").to(dtype)


def denominators(config: DFlash2Config, documents: list[Document]) -> torch.Tensor:
    return DFlash2Draft(config).denominators(supervision(documents))


def give_anchors(config: DFlash2Config, documents: list[Document]) -> None:
    """Hands the drawn anchors to the dense reference."""
    rule = BlockRule(config.num_anchors, config.block_size - 1)
    for document, sample in zip(documents, supervision(documents), strict=True):
        document.anchors = rule.draw(sample)[0].tolist()


def make_setting(target: TargetSpec, module, dtype: torch.dtype) -> Setting:
    shape = module.shape
    return setting_of(target, shape, dtype, block_size=shape.block_size, gamma=module.config.gamma)


def make_parts(module) -> Selector:
    config, shape = module.config, module.shape
    return Selector(
        taps=shape.conv_kernel_size,
        group=shape.conv_group_size,
        top_k=shape.selector_top_k,
        gamma=config.gamma,
        ce=config.ce_weight,
        soft=config.soft_weight,
        weight=config.selector_weight,
    )
