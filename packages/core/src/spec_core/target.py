"""TargetSpec: shapes, names and numbers of a target, read from its folder without torch; and its frozen tensors.

The *trainer* reads embedding, final norm and head itself, from the target's safetensors (single file or sharded
with an index, tied or not), never through the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

NormKind = Literal["rms", "rms_plus_one", "layer"]


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of a multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), under their keys of config.json."""

    q_lora_rank: int | None
    """Width that queries are compressed to; None: they are not."""
    kv_lora_rank: int
    """Width that keys and values are compressed to together."""
    qk_nope_head_dim: int
    """Channels of a query's and a key's head that are not rotated."""
    qk_rope_head_dim: int
    """Rotated ones, which all heads of the keys share."""
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Shapes, names and numbers of a causal language model, from its config.json and safetensors headers."""

    folder: Path
    architecture: str
    model_type: str
    digest: str
    """SHA-256 over config.json, every safetensors header and samples of the bytes: which target this is."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: str
    """Dtype of the stored weights, by torch name."""

    embedding_name: str
    head_name: str
    """Equal to ``embedding_name`` when tied."""
    norm_name: str
    head_bias_name: str | None = None

    norm: NormKind = "rms"
    """``rms_plus_one``: RMS norm that multiplies by (1 + weight), as Gemma does."""
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    """Factor on the head's output (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    logit_softcap: float | None = None
    rope: Mapping[str, Any]
    """Hugging Face ``rope_parameters``: rope_theta, rope_type, partial_rotary_factor and the scaling's own."""
    eos_token_ids: tuple[int, ...] = ()
    latent: LatentSizes | None = None
    """Sizes of its multi-head latent attention; None: it has another attention."""

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head_name == self.embedding_name


@dataclass(frozen=True, kw_only=True)
class TargetTensors:
    """The frozen tensors of the target, as stored, on the CPU (memory-mapped where that is possible)."""

    embedding_VH: Tensor
    head_VH: Tensor
    """The same tensor as ``embedding_VH`` when tied."""
    norm_H: Tensor
    """Weight that multiplies the normed state: ``rms_plus_one`` is folded in (1 + stored weight)."""
    others: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Every tensor of the target under its name in the folder, as stored; each is read when it is asked for."""
