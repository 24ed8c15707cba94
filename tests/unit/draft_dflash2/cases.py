"""Tiny drafts for the DFlash2 tests, in ours and the dense reference's terms; targets and documents are DFlash's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.draft import DFlash2Draft
from spec_kit.block_drafting import BlockRule

from ..draft_dflash.cases import make_tensors, supervision, transformers_rope
from ..draft_dflash.dense_reference import Document, Setting
from .dense_reference import Selector

if TYPE_CHECKING:
    from spec_core import TargetSpec

SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def make_config(**options) -> DFlash2Config:
    return DFlash2Config(**{"block_size": 4, "num_layers": 2, "num_anchors": 6, **SIZES, **options})


def make_model(target: TargetSpec, config: DFlash2Config, dtype: torch.dtype = torch.float32):
    """A draft whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    module = DFlash2Draft(config).build(target, make_tensors(target), None)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise, is_selector = torch.randn_like(parameter), "selector." in name
            parameter.add_(noise * (0.8 if is_selector else 0.2 if parameter.dim() == 1 else 0.15))
    return module.to(dtype)


def denominators(config: DFlash2Config, documents: list[Document]) -> torch.Tensor:
    return DFlash2Draft(config).denominators(supervision(documents))


def give_anchors(config: DFlash2Config, documents: list[Document]) -> None:
    """Hands the drawn anchors to the dense reference."""
    rule = BlockRule(config.num_anchors, config.block_size - 1)
    for document, sample in zip(documents, supervision(documents), strict=True):
        document.anchors = rule.draw(sample)[0].tolist()


def make_setting(target: TargetSpec, module, dtype: torch.dtype) -> Setting:
    tensors, shape = make_tensors(target), module.shape
    inv_freq, scale = transformers_rope(target)
    return Setting(
        embedding=tensors.embedding_VH.to(dtype) * target.embedding_scale,
        target_head=tensors.head_VH.to(dtype),
        target_norm=tensors.norm_H.to(dtype),
        inv_freq=inv_freq,
        rope_scale=scale,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        eps=target.norm_eps,
        windows=list(shape.windows),
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        num_features=len(shape.layers),
        gamma=module.config.gamma,
    )


def make_selector(module) -> Selector:
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
