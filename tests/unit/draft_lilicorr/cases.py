"""Tiny drafts for the LiLiCorr tests, in ours and the dense reference's terms."""

from functools import partial

from spec_core import TargetSpec
from spec_draft_dflash2.lilicorr.config import LiLiCorrConfig
from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft

from ..draft_dflash.cases import setting_of
from ..draft_dflash.dense_reference import Setting
from ..draft_dflash2.dense_reference import Selector
from ..draft_parts import build_large
from .dense_reference import Paths, Result, dense_lilicorr

HEAD = {
    "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 12, "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 3, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 6,
    "lilicorr_logit_scale": 4.0, "lilicorr_vector_eps": 1e-3,
}  # fmt: skip
SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, **HEAD}

Draft = LiLiCorrDraft


def make_config(**options) -> LiLiCorrConfig:
    return LiLiCorrConfig(
        **{"block_size": 4, "num_layers": 2, "num_anchors": 6, "anchor_share": 1.0, **SIZES, **options}
    )


make_model = partial(build_large, LiLiCorrDraft, loud="lilicorr.")


def run_dense(module, weights, documents, target: TargetSpec) -> Result:
    return dense_lilicorr(weights, documents, *dense_terms(module, documents, target))


def dense_terms(module, documents, target: TargetSpec) -> tuple[Setting, Paths]:
    config, shape = module.config, module.shape
    parts = Paths(
        convolution=Selector(taps=shape.conv_kernel_size, group=shape.conv_group_size),
        top_k=shape.lilicorr_candidate_topk,
        heads=shape.lilicorr_num_heads,
        layers=shape.lilicorr_num_layers,
        scale=shape.lilicorr_logit_scale,
        vector_eps=shape.lilicorr_vector_eps,
        gamma=config.gamma,
        ce=config.ce_weight,
        soft=config.soft_weight,
        path=config.path_weight,
        hinge=config.margin_weight,
        margin=config.margin,
        penalty=config.penalty_weight,
    )
    setting = setting_of(target, LiLiCorrDraft(config), module, documents, gamma=config.gamma)
    return setting, parts
