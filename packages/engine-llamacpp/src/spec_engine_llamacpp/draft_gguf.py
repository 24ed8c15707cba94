"""Write a draft's folder as a GGUF file.

Shapes: V' rows of the draft's head, H hidden size, heads of D channels.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spec_core import foreign_errors
from spec_core.errors import ArtifactError
from spec_engine_llamacpp.serving_format import (
    CHAIN,
    HEAD,
    MARKOV_BLOCK,
    SELECTOR_BLOCK,
    WITH_CAPTURE,
    check_llamacpp_folder,
    rope_of,
    served_architecture,
)
from spec_engine_llamacpp.target_gguf import read_target_gguf
from spec_kit.drafting import recognise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from gguf import GGUFReader, GGUFWriter

    from spec_core import TargetSpec
    from spec_kit.drafting import Json

    Arrays = Mapping[str, np.ndarray[Any, Any]]

_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
"""Name of a module of a layer -> name in GGUF, both without ``.weight``."""
_BARE = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
"""Tensors of a layer whose names do not end in ``.weight``."""
_OTHERS = {
    "norm.weight": "output_norm.weight",
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)")
_HEAD_LAYER = "mtp.layers.0."
_OF_HEAD = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    f"{_HEAD_LAYER}post_attention_layernorm": "post_attention_norm",
}
"""Name of a module of an MTP head -> name in GGUF, both without ``.weight``, where a draft's layer has another."""
_OF_TARGET = ("token_embd.weight", "output_norm.weight", "output.weight")
"""Tensors of the target that the file of an MTP head repeats; a target with a tied head lacks the last."""
_PER_LAYER = (".block_count", ".nextn_predict_layers", ".attention.recurrent_layers")
"""Settings of the target that an MTP head's file has otherwise, for it has one layer more."""
_LEFT_OUT = frozenset({"embed_tokens.weight", "t2d"})
"""Tensors that are not written: llama.cpp uses the target's embedding, and does not need ``t2d``."""


def write_draft_gguf(
    folder: Path, target: TargetSpec, target_gguf: Path, output: Path, stored_as: str
) -> None:
    """Write the draft in ``folder`` into the new file ``output``.

    The tokenizer is copied from ``target_gguf``. ``stored_as``: type of the matrices (f32, f16, bf16 or q8_0). A
    matrix whose rows cannot be cut into blocks of q8_0 is stored as f16; norms are stored as f32. Raise ArtifactError
    or TargetError, one line, if llama.cpp would not serve the draft as it was trained.
    """
    from gguf import GGUFWriter

    check_llamacpp_folder(folder, target)
    fields = recognise(folder, target).exported_config(target)
    architecture = served_architecture(fields)
    own = read_target_gguf(target_gguf, target)
    with foreign_errors(ArtifactError, f"draft {folder} cannot be written as {output}"):
        scratch = output.with_name(f".{output.name}.part")
        try:
            if architecture == HEAD:
                writer = GGUFWriter(scratch, WITH_CAPTURE[target.model_type])
                _write_beside_target(writer, target, own)
                tensors = _head_tensors(_read(folder), target.num_layers)
            else:
                writer = GGUFWriter(scratch, "eagle3" if architecture == CHAIN else "dflash")
                _write_settings(writer, fields, architecture, target, own)
                tensors = _tensors(_read(folder), fields, architecture)
            for name, array in tensors:
                _write_tensor(writer, name, array, stored_as)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            os.link(scratch, output)  # which fails where another process has written it
        finally:
            with suppress(FileNotFoundError):
                scratch.unlink()


def _write_settings(
    writer: GGUFWriter, fields: Json, architecture: str, target: TargetSpec, own: GGUFReader
) -> None:
    arch = writer.arch
    rope = rope_of(fields)
    writer.add_name(f"{architecture} of {target.folder.name}")
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_dimension_count(fields["head_dim"])
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    writer.add_vocab_size(target.vocab_size)
    if rope["rope_type"] == "linear":
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{arch}.rope.scaling.factor", float(rope["factor"]))
    if architecture == CHAIN:
        writer.add_array(f"{arch}.target_layers", fields["eagle_aux_hidden_state_layer_ids"])
        writer.add_uint32(f"{arch}.target_hidden_size", fields["target_hidden_size"])
        writer.add_bool(f"{arch}.norm_before_residual", bool(fields.get("norm_before_residual")))
    else:
        _write_block(writer, fields, architecture)
    _copy_settings(writer, own, "tokenizer.")


def _write_beside_target(writer: GGUFWriter, target: TargetSpec, own: GGUFReader) -> None:
    """Write what an MTP head's file has of its target: llama.cpp reads it as a target without its other layers."""
    writer.add_name(f"MTP head of {target.folder.name}")
    writer.add_block_count(target.num_layers + 1)
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)
    _copy_settings(writer, own, f"{writer.arch}.")
    _copy_settings(writer, own, "tokenizer.")
    for tensor in own.tensors:
        if tensor.name in _OF_TARGET:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def _write_block(writer: GGUFWriter, fields: Json, architecture: str) -> None:
    """Write the settings of a block draft. Captured layers are named by their inputs, config.json has outputs."""
    arch = writer.arch
    nested = fields["dflash_config"]
    writer.add_uint32(f"{arch}.block_size", nested.get("block_size", fields.get("block_size")))
    writer.add_array(f"{arch}.target_layers", [layer + 1 for layer in nested["target_layer_ids"]])
    writer.add_bool(f"{arch}.attention.causal", False)
    writer.add_uint32("tokenizer.ggml.mask_token_id", nested["mask_token_id"])
    if architecture == MARKOV_BLOCK:
        writer.add_bool(f"{arch}.sample_from_anchor", fields.get("sample_from_anchor") is not False)
        writer.add_bool(f"{arch}.has_confidence_head", bool(fields.get("enable_confidence_head")))
    if architecture == SELECTOR_BLOCK:
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            writer.add_uint32(f"{arch}.{key}", nested[key])


def _copy_settings(writer: GGUFWriter, own: GGUFReader, prefix: str) -> None:
    """Copy the target's settings whose keys begin with ``prefix``; of its template a draft has no use."""
    from gguf import GGUFValueType

    written = writer.kv_data[0]
    for key, field in own.fields.items():
        is_other = key in written or "chat_template" in key or key.endswith(_PER_LAYER)
        if key.startswith(prefix) and not is_other:
            kind, *inner = field.types
            of = inner[0] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, of)


def _read(folder: Path) -> Arrays:
    """Return the tensors of the folder as float32, except for the integers of a vocabulary map."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in tensors.items()
    }


def _tensors(stored: Arrays, fields: Json, architecture: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield name and values of each tensor of the GGUF file."""
    import numpy as np

    for name, array in stored.items():
        is_targets = name == "lm_head.weight" and architecture != CHAIN and "d2t" not in stored
        if name in _LEFT_OUT or is_targets:
            continue
        if name == "d2t":  # config.json's folder has offsets, a GGUF file has token ids
            yield name, array.astype(np.int64) + np.arange(len(array))
        elif name == "confidence_head.proj.weight":
            missing = fields["hidden_size"] + fields["markov_rank"] - array.shape[1]
            yield _OTHERS[name], np.pad(array, ((0, 0), (0, missing)))
        elif architecture == CHAIN and ("q_proj" in name or "k_proj" in name):
            yield _name(name), _interleaved(array, fields["head_dim"])
        else:
            yield _name(name), array
    if rope_of(fields)["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(rope_of(fields), fields["head_dim"])


def _head_tensors(stored: Arrays, layer: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield name and values of each tensor of an MTP head, a layer after the target's; its stored norms lack 1."""
    for name, array in stored.items():
        module = name.removesuffix(".weight")
        inner = _OF_HEAD.get(module) or _OF_LAYER[module.removeprefix(_HEAD_LAYER)]
        yield f"blk.{layer}.{inner}.weight", array + 1 if array.ndim == 1 else array


def _name(stored: str) -> str:
    """Return the GGUF name of a tensor. Raise ArtifactError for a tensor that has none."""
    if found := _LAYER.fullmatch(stored):
        prefix = f"blk.{found[1] or 0}"
        inner = found[2]
        if inner in _BARE:
            return f"{prefix}.{_BARE[inner]}"
        if (own := _OF_LAYER.get(inner.removesuffix(".weight"))) is not None:
            return f"{prefix}.{own}.weight"
    elif stored == "lm_head.weight":
        return "output.weight"
    elif stored in _OTHERS:
        return _OTHERS[stored]
    raise ArtifactError(
        f"its tensor {stored} has no name in GGUF; write the folder anew (spec-trainer convert)"
    )


def _interleaved(weight: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Return the rows of queries or keys in llama.cpp's order, which rotates neighbouring channels.

    A folder's layers rotate channel i with channel i + D/2.
    """
    return weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _llama3_divisors(rope: Json, head_dim: int) -> np.ndarray[Any, Any]:
    """Return by how much Llama 3's scaling divides each of the D/2 frequencies."""
    import numpy as np

    base = float(rope["rope_theta"]) ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / (2 * np.pi * base)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (share + (1 - share) / factor)).astype(np.float32)


def _write_tensor(writer: GGUFWriter, name: str, array: np.ndarray[Any, Any], stored_as: str) -> None:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    if array.ndim < 2 or array.dtype == np.int64 or name.endswith("conv_base"):
        return writer.add_tensor(name, np.ascontiguousarray(array))
    kind = GGMLQuantizationType[stored_as.upper()]
    if array.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F16
    values = quantize(np.ascontiguousarray(array), kind)
    if kind == GGMLQuantizationType.F16 and not np.isfinite(values).all():
        raise ArtifactError(f"{name} has values that f16 cannot hold; store it as bf16")
    return writer.add_tensor(name, values, raw_dtype=kind)
