"""Tiny drafts for the DSpark tests, in ours and the dense reference's terms."""

from functools import partial

from spec_core import TargetSpec
from spec_draft_dspark.config import DSparkConfig
from spec_draft_dspark.draft import DSparkDraft

from ..draft_dflash.cases import setting_of
from ..draft_parts import build_large
from .dense_reference import Heads, Result, dense_dspark

RANK = 6

Draft = DSparkDraft


def make_config(**options) -> DSparkConfig:
    return DSparkConfig(
        **{
            "block_size": 4, "num_layers": 2, "num_anchors": 6, "anchor_share": 1.0, "markov_rank": RANK,
            **options,
        }
    )  # fmt: skip


make_model = partial(build_large, DSparkDraft, loud="_head.")


def run_dense(module, weights, documents, target: TargetSpec) -> Result:
    config, shape = module.config, module.shape
    parts = Heads(
        markov=shape.markov_head,
        confidence=shape.confidence,
        with_markov=shape.confidence_with_markov,
        first=shape.block_size - shape.num_guesses,
        gamma=config.gamma,
        ce=config.ce_weight,
        l1=config.l1_weight,
        bce=config.confidence_weight,
    )
    setting = setting_of(target, DSparkDraft(config), module, documents, gamma=config.gamma)
    return dense_dspark(weights, documents, setting, parts)
