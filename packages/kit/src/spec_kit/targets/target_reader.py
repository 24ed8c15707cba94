"""Read a target's folder: its description, for which no torch is needed, and its frozen tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from spec_core import TargetSpec, TargetTensors, foreign_errors
from spec_core.errors import TargetError
from spec_core.foreign import read_bytes
from spec_core.target import LatentSizes
from spec_kit.targets.end_tokens import end_token_ids
from spec_kit.targets.quantised_weights import check_quantisation
from spec_kit.targets.safetensors_index import (
    are_equal,
    read_header,
    sampled_blocks,
    stored_tensors,
    weight_files,
)
from spec_kit.targets.target_config import TargetConfig
from spec_kit.targets.target_rope import target_rope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core import TargetType
    from spec_kit.targets.safetensors_index import StoredTensor

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "embedding_norm")
_MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_LAYER_NORM_EPS = 1e-5  # never used: no draft supports a layer norm
_HEADS = ("lm_head", "embed_out", "language_model.lm_head", "model.lm_head")
_NOT_QUANTISED = "use a target whose embedding and head are not quantised"

_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_target(folder: Path) -> TargetSpec:
    """Return the target's description from its JSON files and safetensors headers.

    Raise TargetError if a file is missing or invalid.
    """
    config = TargetConfig(folder)
    described = config.described  # first, since an unknown model type is the clearest error
    tensors = stored_tensors(folder)
    spec = _describe(config, described, tensors)
    _check_shapes(spec, tensors)
    check_quantisation(config, tensors)
    _check_padding(config, spec.vocab_size)
    _check_tied(config, spec)
    return spec


def read_target_tensors(target: TargetSpec) -> TargetTensors:
    """Return the target's frozen tensors on the CPU, memory-mapped unless values have to be computed.

    Raises TargetError if a tensor is missing.
    """
    embedding_VH = _load_tensor(target, target.embedding_name)
    norm_H = _load_tensor(target, target.norm_name)
    if target.norm == "rms_plus_one":
        norm_H = 1 + norm_H.float()  # float32: 1 + w does not fit into bf16's 8 bits
    return TargetTensors(
        embedding_VH=embedding_VH,
        head_VH=embedding_VH if target.tied else _load_tensor(target, target.head_name),
        norm_H=norm_H,
        others=_StoredTensors(target),
    )


def check_target_tensors(target: TargetSpec, names: Sequence[str]) -> None:
    """Raise TargetError if the target's folder lacks a tensor of ``names``."""
    stored = stored_tensors(target.folder) if names else {}
    if missing := [name for name in names if name not in stored]:
        raise TargetError(
            f"target {target.folder} has no tensor {', '.join(missing)}, which the draft reads; use a target that has"
        )


class _StoredTensors(Mapping[str, "Tensor"]):
    """Name -> memory-mapped tensor of a target's folder. Raises TargetError for an unknown name."""

    def __init__(self, target: TargetSpec) -> None:
        self._target = target

    def __getitem__(self, name: str) -> Tensor:
        return _load_tensor(self._target, name)

    def __iter__(self) -> Iterator[str]:
        return iter(stored_tensors(self._target.folder))

    def __len__(self) -> int:
        return len(stored_tensors(self._target.folder))


def _describe(config: TargetConfig, described: TargetType, tensors: Mapping[str, StoredTensor]) -> TargetSpec:
    folder = config.file.parent
    embedding = _embedding_name(folder, tensors)
    norm = _norm_name(folder, tensors, embedding, described.norm_tensor)
    head, head_bias = _head_names(config, tensors, embedding)
    hidden_size = config.integer("hidden_size", "n_embd", "d_model")
    heads = config.integer("num_attention_heads", "n_head", "n_heads")
    max_positions = config.integer(*_MAX_POSITIONS)
    return TargetSpec(
        folder=folder,
        architecture=config.architecture,
        model_type=config.model_type,
        digest=_target_digest(folder),
        num_layers=config.integer("num_hidden_layers", "n_layer", "n_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=config.integer("head_dim", default=max(1, hidden_size // heads)),
        vocab_size=config.integer("vocab_size"),
        max_positions=max_positions,
        dtype=_torch_dtype(tensors[embedding], embedding),
        embedding_name=embedding,
        head_name=head,
        norm_name=norm,
        head_bias_name=head_bias,
        norm=described.norm,
        norm_eps=config.positive(
            described.eps, default=_LAYER_NORM_EPS if described.norm == "layer" else None
        ),
        hidden_act=config.word("hidden_activation", "hidden_act", "activation_function", default="silu"),
        attention_bias=_attention_bias(config, tensors, embedding),
        embedding_scale=described.embedding_scale(config),
        logit_scale=described.logit_scale(config),
        logit_softcap=described.logit_softcap(config),
        rope=target_rope(config, max_positions),
        eos_token_ids=end_token_ids(config),
        latent=_latent(config),
        image_token_id=_image_token_id(config),
        image_ends=_image_ends(config),
    )


def _image_token_id(config: TargetConfig) -> int | None:
    key = config.described.image_token
    return _token_id(config, key) if key is not None else None


def _image_ends(config: TargetConfig) -> tuple[int, int] | None:
    """Return the tokens that the image processor puts around an image; None if there are none."""
    keys = config.described.image_ends
    if keys is None or _image_token_id(config) is None:
        return None
    ends = tuple(_token_id(config, key) for key in keys)
    for key, end in zip(keys, ends, strict=True):
        if end is None:
            raise config.error((key,), None, "the id of a token that stands beside each image")
    return cast("tuple[int, int]", ends)


def _token_id(config: TargetConfig, key: str) -> int | None:
    ids = config.token_ids(key, config.get(key))
    return ids[0] if ids else None


def _latent(config: TargetConfig) -> LatentSizes | None:
    """Return the sizes of a latent attention, or None if config.json does not have them."""
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if any(not config.get(key) for key in keys):
        return None
    queries = config.integer("q_lora_rank") if config.get("q_lora_rank") else None
    return LatentSizes(q_lora_rank=queries, **{key: config.integer(key) for key in keys})


def _load_tensor(target: TargetSpec, name: str) -> Tensor:
    from safetensors import safe_open

    stored = stored_tensors(target.folder).get(name)
    if stored is None:
        raise TargetError(
            f"{target.folder} no longer holds {name}; the target was changed while it was in use"
        )
    with (
        foreign_errors(TargetError, f"{stored.file} cannot be read"),
        safe_open(stored.file, framework="pt", device="cpu") as file,
    ):
        return file.get_tensor(name)


def _embedding_name(folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
    """Return the name of the only embedding outside the layers; names of layers' tensors have a number."""
    found = [name for name in tensors if _leaf(name) in _EMBEDDINGS and not _in_stack(name)]
    if len(found) == 1:
        return found[0]
    none = "no token embedding (an exported draft has none: give the model that it drafts for)"
    problem = f"several token embeddings ({', '.join(sorted(found))})" if found else none
    raise TargetError(f"{folder} holds {problem}; looked for {_tried('…', _EMBEDDINGS)}")


def _norm_name(
    folder: Path, tensors: Mapping[str, StoredTensor], embedding: str, described: str | None
) -> str:
    """Return the name of the final norm's weight. ``described``: the name that the target's type gives it."""
    prefix = embedding.removesuffix(f"{_leaf(embedding)}.weight")
    leaves = _NORMS if described is None else (described.removesuffix(".weight"),)
    for leaf in leaves:
        if f"{prefix}{leaf}.weight" in tensors:
            return f"{prefix}{leaf}.weight"
    raise TargetError(f"{folder} holds no final norm; looked for {_tried(prefix, leaves)}")


def _head_names(
    config: TargetConfig, tensors: Mapping[str, StoredTensor], embedding: str
) -> tuple[str, str | None]:
    """Return the names of the head and of its bias, or None for the bias.

    A stored head is used even if config.json ties it to the embedding; then both are equal (``_check_tied``).
    """
    unties = config.unties
    for stem in _HEADS:
        if f"{stem}.weight" in tensors:
            return f"{stem}.weight", f"{stem}.bias" if f"{stem}.bias" in tensors else None
    # A quantised head has other names (lm_head.qweight, …); it must not count as absent (tied).
    partial = sorted(name for name in tensors if name.startswith(tuple(f"{stem}." for stem in _HEADS)))
    if partial or unties:
        found = f", only {partial[0]}" if partial else " and config.json sets tie_word_embeddings to false"
        advice = f"; {_NOT_QUANTISED}" if partial else ""
        raise TargetError(
            f"{config.file.parent} holds no head{found}; looked for {_tried('', _HEADS)}{advice}"
        )
    return embedding, None


def _check_shapes(target: TargetSpec, tensors: Mapping[str, StoredTensor]) -> None:
    wide = (target.vocab_size, target.hidden_size)
    expected = {target.embedding_name: wide, target.head_name: wide, target.norm_name: (target.hidden_size,)}
    for name, shape in expected.items():
        stored = tensors[name].shape
        if stored != shape:
            raise TargetError(
                f"{target.folder}: {name} has shape {list(stored)}, config.json says {list(shape)} "
                f"(vocab_size {target.vocab_size}, hidden_size {target.hidden_size})"
            )
        _torch_dtype(tensors[name], name)


def _check_padding(config: TargetConfig, vocab_size: int) -> None:
    """Raise TargetError if ``pad_token_id`` is no row of the embedding; -1 means the last row."""
    value: object = config.get("pad_token_id")
    if value is not None and not (type(value) is int and -vocab_size <= value < vocab_size):
        raise config.error(("pad_token_id",), value, f"a token id below vocab_size={vocab_size}")


def _check_tied(config: TargetConfig, target: TargetSpec) -> None:
    """Raise TargetError if the head is tied to the embedding, and another head is stored.

    vLLM then uses the embedding, transformers the stored head.
    """
    if (
        not target.tied
        and config.ties
        and not are_equal(target.folder, target.head_name, target.embedding_name)
    ):
        raise TargetError(
            f"{config.file} ties the head to the embedding (tie_word_embeddings), but {target.head_name} is stored "
            f"and differs from {target.embedding_name}, and engines differ in which they use; write "
            f'"tie_word_embeddings": false, or delete that tensor'
        )


def _torch_dtype(stored: StoredTensor, name: str) -> str:
    if stored.dtype not in _TORCH_DTYPES:
        raise TargetError(
            f"{stored.file}: {name} is stored as {stored.dtype}, expected one of {', '.join(_TORCH_DTYPES)}; "
            f"{_NOT_QUANTISED}"
        )
    return _TORCH_DTYPES[stored.dtype]


def _attention_bias(config: TargetConfig, tensors: Mapping[str, StoredTensor], embedding: str) -> bool:
    """Return whether attention has biases; Qwen2 has them without a field in config.json."""
    layers = embedding.removesuffix(f"{_leaf(embedding)}.weight") + "layers."
    stored = any(name.startswith(layers) and name.endswith("q_proj.bias") for name in tensors)
    return stored or config.flag("attention_bias")


def _target_digest(folder: Path) -> str:
    """Return ``TargetSpec.digest`` of a target's folder."""
    digest = hashlib.sha256(read_bytes(folder / "config.json", TargetError))
    for file in weight_files(folder):
        digest.update(file.name.encode())
        digest.update(read_header(file))
        for block in sampled_blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _leaf(name: str) -> str:
    """Return the last module name of a weight's name, such as ``wte`` of ``transformer.wte.weight``.

    Return an empty string for any other tensor.
    """
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] == "weight" else ""


def _in_stack(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _tried(prefix: str, leaves: tuple[str, ...]) -> str:
    return ", ".join(f"{prefix}{leaf}.weight" for leaf in leaves)
