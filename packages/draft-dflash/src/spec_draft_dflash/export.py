"""A draft as stock vLLM and SGLang load it: the fields of config.json, and tensors without a prefix or a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.drafting.decoder_format import decoder_fields
from spec_core.drafting.served_draft import as_served, end_tokens, served_dtype
from spec_core.targets.rope_parameters import rope_fields
from spec_core.targets.target_reader import read_target_tensors
from spec_draft_dflash.artifact import ARCHITECTURE, EMBEDDING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from spec_core.drafting.served_draft import Json
    from spec_core.target import TargetSpec
    from spec_draft_dflash.shape import DraftShape


def served_tensors(
    weights: Mapping[str, Tensor], shape: DraftShape, target: TargetSpec
) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's tensors in the dtype that they are served in.

    Engines share the target's embedding: SGLang the module with its scale, vLLM the bare rows, so for a scaled
    embedding vLLM gets one of its own.
    """
    dtype = served_dtype(target)
    for name in shape.tensor_shapes():
        yield name, as_served(weights[name], dtype)
    if target.embedding_scale != 1:
        yield EMBEDDING, as_served(read_target_tensors(target).embedding_VH * target.embedding_scale, dtype)


def served_config(shape: DraftShape, target: TargetSpec) -> Json:
    """Fields that both engines read."""
    dtype = served_dtype(target)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        **decoder_fields(shape),
        "tie_word_embeddings": target.tied,
        "num_target_layers": target.num_layers,
        **end_tokens(target),
        **rope_fields(shape.rope),
        **_attention_fields(shape),
        **_block_fields(shape),
    }


def _attention_fields(shape: DraftShape) -> Json:
    """vLLM 0.32 and SGLang 0.5.23 read ``is_causal`` first, for all layers at once. vLLM 0.26 and SGLang 0.5.16
    do not know it; without it, all take sliding layers as causal and full ones as not. transformers drops a
    ``sliding_window`` that is not declared as used."""
    causal = shape.is_causal
    return {
        "layer_types": list(shape.layer_types),
        "use_sliding_window": shape.sliding_window is not None,
        "sliding_window": shape.sliding_window,
        "max_window_layers": shape.num_layers,
        **({} if causal is None else {"is_causal": causal}),
    }


def _block_fields(shape: DraftShape) -> Json:
    """The captured layers in both conventions: ``target_layer_ids`` counts outputs of layers, vLLM's top-level list,
    which it reads first, streams entering them."""
    nested = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in shape.layers],
    }
    return {
        "block_size": shape.block_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "dflash_config": nested,
    }
