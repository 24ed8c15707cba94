"""Writes a draft as stock vLLM and SGLang load it: config.json and model.safetensors, one layer, no prefix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from spec_draft_eagle3.artifact import ARCHITECTURE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core.target import TargetSpec
    from spec_draft_eagle3.shape import DraftShape, Json

_SERVED_DTYPES = ("float32", "bfloat16", "float16")


def write_draft(weights: Mapping[str, Tensor], shape: DraftShape, target: TargetSpec, folder: Path) -> None:
    """``weights``: the module's full state dict. Floating tensors are stored in the target's dtype, which is the
    dtype they are served in (bfloat16 where that is a quantised one); the vocabulary mapping stays int64 and bool."""
    dtype = target.dtype if target.dtype in _SERVED_DTYPES else "bfloat16"
    names = [*shape.tensor_shapes(), *(("d2t", "t2d") if shape.reduced else ())]
    stored = {name: _as_stored(weights[name], getattr(torch, dtype)) for name in names}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(served_config(shape, target, dtype), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


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
        **_end_tokens(target),
        **_rope_fields(shape),
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


def _rope_fields(shape: DraftShape) -> Json:
    """Today's ``rope_parameters``, and what readers of older transformers configurations expect."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **shape.rope}
    partial = rope.get("partial_rotary_factor")
    scaling = {
        key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    return {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        **({} if partial is None else {"partial_rotary_factor": partial}),
    }


def _end_tokens(target: TargetSpec) -> Json:
    ends = list(target.eos_token_ids)
    return {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}


def _as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    # A copy of its own: safetensors refuses tensors that share memory.
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone().contiguous()
