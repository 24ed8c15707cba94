"""Tiny drafts for the P-EAGLE tests, in ours and the dense reference's terms."""

from functools import partial

from spec_backend_cpu.kernels import KERNELS
from spec_core import TargetSpec
from spec_draft_peagle.chains import ChainRule
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.draft import PEagleDraft

from ..draft_batches import supervision, target_setting
from ..draft_parts import build_large
from .dense_reference import Result, Setting, dense_peagle

Draft = PEagleDraft


def make_config(**options) -> PEagleConfig:
    return PEagleConfig(**{"num_guesses": 4, "num_layers": 2, **options})


make_model = partial(build_large, PEagleDraft, kernel=KERNELS.get)


def make_rule(config: PEagleConfig) -> ChainRule:
    return ChainRule(
        num_guesses=config.num_guesses, retention=config.retention, least_retention=config.least_retention
    )


def run_dense(module, weights, documents, target: TargetSpec) -> Result:
    """The dense reference is given the drawn chains."""
    config, shape, reached = module.config, module.shape, [0] * module.config.num_guesses
    for document, sample in zip(documents, supervision(documents), strict=True):
        count_R, reach_R = make_rule(config).draw(sample)
        document.elements = [(row, d) for row, length in enumerate(count_R.tolist()) for d in range(length)]
        reached = [n + int((reach_R > d).sum()) for d, n in enumerate(reached)]
    setting = Setting(
        **target_setting(target),
        kept=module.ids_V.tolist(),
        num_layers=shape.num_layers,
        mask_token_id=shape.mask_token_id,
        num_guesses=config.num_guesses,
        loss=config.loss,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
    )
    return dense_peagle(weights, documents, setting, reached)
