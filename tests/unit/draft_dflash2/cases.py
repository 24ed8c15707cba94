"""Tiny drafts for the DFlash2 tests, in ours and the dense reference's terms."""

from functools import partial

from spec_core import TargetSpec
from spec_draft_dflash2.config import DFlash2Config
from spec_draft_dflash2.draft import DFlash2Draft

from ..draft_dflash.cases import setting_of
from ..draft_parts import build_large
from .dense_reference import Result, Selector, dense_dflash2

SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}

Draft = DFlash2Draft


def make_config(**options) -> DFlash2Config:
    return DFlash2Config(
        **{"block_size": 4, "num_layers": 2, "num_anchors": 6, "anchor_share": 1.0, **SIZES, **options}
    )


make_model = partial(build_large, DFlash2Draft, loud="selector.")


def run_dense(module, weights, documents, target: TargetSpec) -> Result:
    config, shape = module.config, module.shape
    parts = Selector(
        taps=shape.conv_kernel_size,
        group=shape.conv_group_size,
        top_k=shape.selector_top_k,
        gamma=config.gamma,
        ce=config.ce_weight,
        soft=config.soft_weight,
        weight=config.selector_weight,
    )
    setting = setting_of(target, DFlash2Draft(config), module, documents, gamma=config.gamma)
    return dense_dflash2(weights, documents, setting, parts)
