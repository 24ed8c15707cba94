"""Tiny drafts for the Eagle3 tests, in ours and in the dense reference's terms."""

import math
from functools import partial

import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_backend_cpu.kernels import KERNELS
from spec_core import TargetSpec, no_kernel
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..draft_batches import target_setting
from ..draft_parts import CPU, build_large
from .dense_reference import Latent, Result, Setting, dense_eagle3

Draft = Eagle3Draft
PUBLISHED = {"norm_before_residual": True, "norm_before_fc": True, "qk_norm": True}
"""Norms of published drafts."""
KERNEL_AND_CHUNKED = (KERNELS.get, no_kernel)
MLA = {
    "attention": "mla", "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}  # fmt: skip


def make_config(**options) -> Eagle3Config:
    return Eagle3Config(**{"num_steps": 4, **options})


make_model = partial(build_large, Eagle3Draft, kernel=KERNELS.get)


def run_dense(module, weights, documents, target: TargetSpec) -> Result:
    return dense_eagle3(weights, documents, make_setting(target, module))


def make_setting(target: TargetSpec, module) -> Setting:
    config, ours = module.config, target_setting(target)
    if config.attention == "mla":
        ours["inv_freq"], ours["rope_scale"] = transformers_latent_rope(target, config)
        ours["latent"] = make_latent(target, config)
    return Setting(
        **ours,
        kept=module.ids_V.tolist(),
        num_steps=config.num_steps,
        decay=config.step_decay,
        loss=config.loss,
        opd=config.opd,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        **{name: bool(getattr(config, name)) for name in PUBLISHED},
        num_layers=config.num_layers or 1,
        window=config.sliding_window,
        image=module.merged_token_id,
    )


def make_latent(target: TargetSpec, config: Eagle3Config) -> Latent:
    mscale = 0.1 * math.log(target.rope.get("factor", 1.0)) + 1
    return Latent(
        kv_rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        score_scale=mscale**2,
    )


def latent_rope(target: TargetSpec) -> dict[str, object]:
    """YaRN as DeepSeek V3's: the temperature is in the scores alone."""
    plain = {"factor": 1.0, "original_max_position_embeddings": target.max_positions}
    return {**plain, **target.rope, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}


def transformers_latent_rope(target: TargetSpec, options: Eagle3Config) -> tuple[torch.Tensor, float]:
    config = DeepseekV3Config(
        qk_rope_head_dim=options.qk_rope_head_dim,
        max_position_embeddings=target.max_positions,
        rope_parameters=latent_rope(target),
    )
    return ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
