"""TargetSpec has the shapes, names and constants of a target, read from its folder without torch.

TargetTensors has the target's tensors. The *trainer* reads embedding, final norm and head itself, from the
target's safetensors (a single file, or several with an index; tied or not), never through the engine.
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
    """Sizes of a multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as named in config.json."""

    q_lora_rank: int | None
    """Width to which queries are compressed; None if they are not compressed."""
    kv_lora_rank: int
    """Width to which a token's keys and values are compressed together."""
    qk_nope_head_dim: int
    """Number of channels of each query and key head that are not rotated."""
    qk_rope_head_dim: int
    """Number of rotated channels of each query and key head; all key heads share them."""
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Shapes, tensor names and constants of a causal LM, from config.json and safetensors headers."""

    folder: Path
    architecture: str
    model_type: str
    digest: str
    """Identifies the target: SHA-256 over config.json, every safetensors header, and bytes from four places of each
    tensor."""

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
    """Name of the head's weight; equal to ``embedding_name`` if head and embedding are tied."""
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
    """Hugging Face ``rope_parameters``: rope_theta, rope_type, partial_rotary_factor, and the scaling's
    parameters."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of the tokens at which servers end an answer: of generation_config.json or config.json, and the
    tokenizer's."""
    latent: LatentSizes | None = None
    """Sizes of the target's multi-head latent attention; None if it has another kind of attention."""
    image_token_id: int | None = None
    """Id of the placeholder token for each embedding of an image. None if no images are given to this target."""
    image_ends: tuple[int, int] | None = None
    """Ids of the tokens that the target's image processor puts before and behind each image. None if it puts
    no tokens there."""

    @property
    def tied(self) -> bool:
        """Whether the head and the embedding are the same tensor."""
        return self.head_name == self.embedding_name


@dataclass(frozen=True, kw_only=True)
class TargetTensors:
    """The frozen tensors of the target, as stored, on the CPU (memory-mapped if possible)."""

    embedding_VH: Tensor
    head_VH: Tensor
    """Weight of the head [V, H]; the same tensor as ``embedding_VH`` if tied."""
    norm_H: Tensor
    """Weight that multiplies the normalized state; for ``rms_plus_one`` it is 1 + the stored weight."""
    others: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Name in the safetensors files -> stored tensor, for every tensor of the target. Each is read on
    access."""
