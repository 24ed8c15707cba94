"""Writes a draft as stock vLLM and SGLang load it: config.json and model.safetensors, one layer, no prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.rope_parameters import rope_fields
from spec_core.served_draft import end_tokens, served_dtype, write_folder
from spec_draft_eagle3.artifact import ARCHITECTURE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core.served_draft import Json
    from spec_core.target import TargetSpec
    from spec_draft_eagle3.shape import DraftShape


def write_draft(weights: Mapping[str, Tensor], shape: DraftShape, target: TargetSpec, folder: Path) -> None:
    """``weights``: the module's full state dict. Floating tensors are stored in the target's dtype, which is the
    dtype they are served in (bfloat16 where that is a quantised one); the vocabulary mapping stays int64 and bool."""
    dtype = served_dtype(target)
    names = [*shape.tensor_shapes(), *(("d2t", "t2d") if shape.reduced else ())]
    tensors = {name: weights[name] for name in names}
    write_folder(folder, served_config(shape, target, dtype), tensors, dtype)


def served_config(shape: DraftShape, target: TargetSpec, dtype: str) -> Json:
    """Fields that both engines read. ``draft_vocab_size`` is always there: SGLang needs it, and takes null as 'use
    the target's head'. Without a reduced vocabulary it is the target's and there is no d2t: row = id for both."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": shape.target_vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        **end_tokens(target),
        **rope_fields(shape.rope),
        **_layer_fields(shape, target),
    }


def _layer_fields(shape: DraftShape, target: TargetSpec) -> Json:
    """The captured layers in both conventions: vLLM reads the top-level list (streams *entering* layer k) first,
    SGLang the nested one (*outputs* of layer k − 1)."""
    layers = shape.layer_ids(target.num_layers)
    nested = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
    }
    return {
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": nested,
    }
