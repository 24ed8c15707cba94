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
"""A size of multi-head latent attention. If it is None, a run directory's configuration does not contain it, as in
earlier versions."""


ImageEmbeddings = Literal["placeholder", "merged"]
"""Embeddings that a draft reads at the tokens of an image."""


class Eagle3Config(DecoderConfig):
    """Options of the Eagle3 draft.

    None: the value in the folder ``init_from`` or, without a folder, the default that is named below. An option
    that contradicts the folder is an error.
    """

    former_defaults: ClassVar[Mapping[str, object]] = {"fc_norm": None, "norm_output": None}
    speed_only: ClassVar[frozenset[str]] = frozenset({"checkpoint_activations"})

    loss: DistilledLoss = "ce"
    """``ce``: cross-entropy to the target's distribution. ``lk_alpha``: −log of the expected acceptance.
    ``lk_lambda``: a weighted sum of KL divergence and probability of rejection; the more guesses are accepted, the
    less KL weighs (arXiv 2602.23881)."""
    num_steps: int = pydantic.Field(7, ge=1, le=1024)
    """Unrolled steps of the training-time test: how many tokens ahead the draft is trained."""
    step_decay: float = pydantic.Field(0.8, gt=0, le=1)
    """Weight of one step relative to the previous step: step s weighs step_decay ** s."""
    checkpoint_activations: bool = False
    """Whether to compute each layer of each step again in the backward pass instead of storing its activations.
    This needs less memory and one more forward pass of the layers; results stay the same."""

    attention: Literal["gqa", "mla"] = pydantic.Field("gqa", exclude_if=lambda kind: kind == "gqa")
    """``gqa``: grouped queries, as Llama's. ``mla``: multi-head latent attention, as DeepSeek V3's and Kimi K2's,
    whose sizes are the next five keys."""
    q_lora_rank: LatentSize = None
    """Width that queries are compressed to. None: the target's, else DeepSeek V3's (1536); likewise for the next
    four keys."""
    kv_lora_rank: LatentSize = None
    """Width that keys and values are compressed to together, for an engine's cache. DeepSeek V3's: 512."""
    qk_nope_head_dim: LatentSize = None
    """Channels of a query's and a key's head without rotary embeddings. DeepSeek V3's: 128."""
    qk_rope_head_dim: LatentSize = None
    """Channels with rotary embeddings of a query's and a key's head; all heads of the keys share them. DeepSeek
    V3's: 64."""
    v_head_dim: LatentSize = None
    """Channels of a value's head. DeepSeek V3's: 128."""
    num_layers: int | None = pydantic.Field(
        None, ge=1, le=MOST_LAYERS, exclude_if=lambda number: number is None
    )
    """Number of decoder layers. None: 1. The first layer reads the token and the state, each further layer only the
    state."""
    image_embeddings: ImageEmbeddings | None = pydantic.Field(None, exclude_if=lambda kind: kind is None)
    """Embeddings that the draft reads at an image's tokens. ``placeholder``: the placeholder token's, as vLLM serves
    it. ``merged``: the target's own embeddings of the image, as SGLang serves it from 0.5.20 on. None:
    ``placeholder``."""
    vocab_size: int | None = pydantic.Field(None, ge=1)
    """Rows of the draft's head: the most frequent supervised tokens. None: the target's whole vocabulary."""
    layers: CapturedLayers | None = pydantic.Field(None, min_length=1)
    """Ids of the target's residual streams that feed the draft; id k is the input of target layer k. None: 2, N //
    2 and N − 3 of N layers."""
    fc_norm: bool | None = True
    """EAGLE 3.1: whether each captured layer's state goes through an RMS norm before ``fc``. None: no."""
    norm_output: bool | None = True
    """EAGLE 3.1: whether the next step gets the state after the final norm. None: it gets the state before the
    norm."""
