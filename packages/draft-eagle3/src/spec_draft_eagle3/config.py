"""Define the options of the Eagle3 draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from spec_kit.chain_drafting import ChainConfig

MOST_LAYERS = 16
"""Upper limit on the draft's layers, so that a damaged config.json does not create thousands of layers. No
published draft has as many."""


LatentSize = Annotated[int | None, pydantic.Field(ge=1, exclude_if=lambda size: size is None)]
"""A size of multi-head latent attention. A run directory's configuration omits a size that is None."""


ImageEmbeddings = Literal["placeholder", "merged"]
"""Embeddings that a draft reads at the placeholder tokens of an image."""


class Eagle3Config(ChainConfig):
    """Options of the Eagle3 draft."""

    num_steps: int = pydantic.Field(7, ge=1, le=1024)
    """Number of unrolled steps of the training-time test: how many tokens ahead the draft is trained."""
    step_decay: float = pydantic.Field(0.8, gt=0, le=1)
    """Weight of one step's loss relative to the previous step's loss: step s has the weight step_decay **
    s."""
    opd: bool = pydantic.Field(False, exclude_if=lambda switch: not switch)
    """Draft-OPD (arXiv 2605.29343), with ``decode.on_policy``: a guess that the target refused in step s has the loss
    step_decay ** s · KL(draft ‖ target), an accepted guess has ``loss``, and both kinds weigh one half."""
    attention: Literal["gqa", "mla"] = pydantic.Field("gqa", exclude_if=lambda kind: kind == "gqa")
    """``gqa``: grouped-query attention, as in Llama. ``mla``: multi-head latent attention, as in DeepSeek V3
    and Kimi K2; the next five keys are its sizes."""
    q_lora_rank: LatentSize = None
    """Width that queries are compressed to. None means the target's size, or DeepSeek V3's (1536) if the
    target has none. The same holds for the next four keys."""
    kv_lora_rank: LatentSize = None
    """Width that keys and values are compressed to together, for an engine's KV cache. DeepSeek V3 has
    512."""
    qk_nope_head_dim: LatentSize = None
    """Number of channels without rotary embeddings in a head of queries and keys. DeepSeek V3 has 128."""
    qk_rope_head_dim: LatentSize = None
    """Number of channels with rotary embeddings in a head of queries and keys; all heads of the keys share
    these channels. DeepSeek V3 has 64."""
    v_head_dim: LatentSize = None
    """Number of channels of a head of values. DeepSeek V3 has 128."""
    num_layers: int | None = pydantic.Field(
        None, ge=1, le=MOST_LAYERS, exclude_if=lambda number: number is None
    )
    """Number of decoder layers. None means 1. The first layer reads the token's embedding and the hidden
    state. Each later layer reads only the hidden state."""
    sliding_window: int | None = pydantic.Field(None, ge=2, exclude_if=lambda size: size is None)
    """Number of positions to which a query attends, its own included, in every layer; more than ``num_steps``.
    None means all."""
    image_embeddings: ImageEmbeddings | None = pydantic.Field(None, exclude_if=lambda kind: kind is None)
    """Embeddings that the draft reads at the placeholder tokens of an image. ``placeholder``: the embedding
    of the placeholder token, which vLLM uses. ``merged``: the target's own embeddings of the image, which
    SGLang uses from 0.5.20 on. None means ``placeholder``."""
    fc_norm: bool | None = True
    """EAGLE 3.1: whether each captured layer's state goes through an RMS norm before ``fc``. None means
    no."""
    norm_output: bool | None = True
    """EAGLE 3.1: whether the next step gets the state after the final norm. None means that it gets the state
    before the norm."""
    qk_norm: bool | None = pydantic.Field(None, exclude_if=lambda switch: switch is None)
    """Whether each head of queries and of keys goes through an RMS norm, as in Qwen3. Only vLLM serves such a
    draft. None means no."""
