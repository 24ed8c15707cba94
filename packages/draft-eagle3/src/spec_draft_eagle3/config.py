"""Options of the Eagle3 draft: section ``draft`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (pydantic evaluates annotations)
from typing import Annotated, ClassVar, Literal

import pydantic

from spec_kit.drafting import CapturedLayers, DecoderConfig, DistilledLoss

MOST_LAYERS = 16
"""Limit on the draft's layers, above any published draft: a damaged config.json does not create thousands of
layers."""


LatentSize = Annotated[int | None, pydantic.Field(ge=1, exclude_if=lambda size: size is None)]
"""A size of multi-head latent attention. It is left out where it has no value, as in run directories of before."""


class Eagle3Config(DecoderConfig):
    """Options of the Eagle3 draft.

    None means: what the folder ``init_from`` says, else the default that is named. An option that contradicts the
    folder is an error.
    """

    former_defaults: ClassVar[Mapping[str, object]] = {"fc_norm": None, "norm_output": None}
    speed_only: ClassVar[frozenset[str]] = frozenset({"checkpoint_activations"})

    loss: DistilledLoss = "ce"
    """``ce``: cross-entropy to the target's distribution. ``lk_alpha``: −log of the expected acceptance.
    ``lk_lambda``: KL and acceptance mixed, ever more acceptance as it grows (arXiv 2602.23881)."""
    num_steps: int = pydantic.Field(7, ge=1, le=1024)
    """Unrolled steps of the training-time test: how many tokens ahead the draft is trained."""
    step_decay: float = pydantic.Field(0.8, gt=0, le=1)
    """Weight of one step relative to the one before: step s weighs step_decay ** s."""
    checkpoint_activations: bool = False
    """Compute each layer of each step again in the backward pass instead of keeping its activations: less
    memory, for a further forward pass of the layers. The step stays the same."""

    attention: Literal["gqa", "mla"] = pydantic.Field("gqa", exclude_if=lambda kind: kind == "gqa")
    """``gqa``: grouped queries, as Llama's. ``mla``: multi-head latent attention, as DeepSeek V3's and Kimi K2's,
    whose sizes are the next five keys."""
    q_lora_rank: LatentSize = None
    """Width that queries are compressed to. None, for all five: the target's, else DeepSeek V3's: 1536."""
    kv_lora_rank: LatentSize = None
    """Width that keys and values are compressed to together: what an engine caches. DeepSeek V3's: 512."""
    qk_nope_head_dim: LatentSize = None
    """Channels of a query's and a key's head without rotary embeddings. DeepSeek V3's: 128."""
    qk_rope_head_dim: LatentSize = None
    """Channels with rotary embeddings, which all heads of the keys share. DeepSeek V3's: 64."""
    v_head_dim: LatentSize = None
    """Channels of a value's head. DeepSeek V3's: 128."""
    num_layers: int | None = pydantic.Field(
        None, ge=1, le=MOST_LAYERS, exclude_if=lambda number: number is None
    )
    """Decoder layers. None: 1. The first reads the token and the state, each further one the state alone."""
    vocab_size: int | None = pydantic.Field(None, ge=1)
    """Rows of the draft's head: the most frequent supervised tokens. None: the target's whole vocabulary."""
    layers: CapturedLayers | None = pydantic.Field(None, min_length=1)
    """Ids k of the residual streams (entering target layer k) that feed the draft. None: 2, N // 2, N − 3."""
    fc_norm: bool | None = True
    """EAGLE 3.1: one RMS norm per captured layer before ``fc``. None: without."""
    norm_output: bool | None = True
    """EAGLE 3.1: the normed state is what the next step gets. None: the state before the norm."""
