"""Tiny drafts for the DFlash tests, in ours and in the dense reference's terms."""

from functools import partial

from spec_core import TargetSpec
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft

from ..dense_parts import Document
from ..draft_batches import give_anchors, target_setting
from ..draft_parts import build_large
from .dense_reference import Result, Setting, dense_dflash

Draft = DFlashDraft


def make_config(**options) -> DFlashConfig:
    return DFlashConfig(
        **{"block_size": 5, "num_layers": 2, "num_anchors": 6, "anchor_share": 1.0, **options}
    )


make_model = partial(build_large, DFlashDraft)


def run_dense(module, weights, documents, target: TargetSpec) -> Result:
    config = module.config
    setting = setting_of(
        target,
        DFlashDraft(config),
        module,
        documents,
        gamma=config.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(config.block_size, config.block_size / 2),
        loss=config.loss,
        alpha=config.dpace_alpha,
    )
    return dense_dflash(weights, documents, setting)


def setting_of(target: TargetSpec, draft, module, documents: list[Document], **own) -> Setting:
    """The step of a draft in blocks. Documents without rounds are given the drawn anchors."""
    shape = module.shape
    if documents[0].rounds is None:
        give_anchors(draft, documents)
    return Setting(
        **target_setting(target),
        windows=list(zip(shape.windows, shape.causality, strict=True)),
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        num_features=len(shape.layers),
        kept=module.ids_V.tolist(),
        opd=module.config.opd,
        **own,
    )
