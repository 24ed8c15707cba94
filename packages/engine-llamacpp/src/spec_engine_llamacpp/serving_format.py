"""Say how llama.cpp serves a draft's folder, and check whether it can.

The draft's plugin has already checked the folder. llama.cpp drops settings that it does not know, without a word, so
each of them is a flaw here. Sources: ``eagle3.cpp``, ``dflash.cpp`` and ``qwen35.cpp`` in ``src/models``, and runs of
the server in xllamacpp 2026.10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_core import Draft, TargetSpec
from spec_core.errors import ArtifactError, ConfigError
from spec_kit.drafting import (
    QUANTISATION,
    Flaw,
    Json,
    ServedFolder,
    architectures,
    check_served,
    parallel_mask_token,
    present,
    recognise,
)

CHAIN = "LlamaForCausalLMEagle3"
"""Architecture name of an autoregressive draft."""
BLOCK = "DFlashDraftModel"
SELECTOR_BLOCK = "DFlash2DraftModel"
MARKOV_BLOCK = "Qwen3DSparkModel"
HEAD = "Qwen3_5ForCausalLM"
"""Architecture name of the MTP head of a dense Qwen3.5, alone."""
METHODS = {
    CHAIN: "draft-eagle3",
    BLOCK: "draft-dflash",
    SELECTOR_BLOCK: "draft-dflash",
    MARKOV_BLOCK: "draft-dspark",
    HEAD: "draft-mtp",
}
"""Architecture name of a draft -> value of llama.cpp's ``--spec-type``."""
CAPTURED = 3
"""Number of captured layers that llama.cpp takes of an autoregressive draft."""
HEAD_TARGET = "qwen3_5_text"
"""Model type of the targets of ``HEAD``."""
WITH_CAPTURE = {
    "llama": "llama",
    "mistral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    HEAD_TARGET: "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "lfm2": "lfm2",
    "minimax_m2": "minimax-m2",
    "nemotron_h": "nemotron_h",
}
"""Model type of a target -> its architecture in a GGUF file, if llama.cpp can capture its layers. For any other,
the server starts and ends at the first request."""


def served_architecture(fields: Json) -> str:
    """Return the architecture name of a draft that has passed ``check_llamacpp_folder``."""
    return next(iter(architectures(fields) & METHODS.keys()))


def check_llamacpp_folder(folder: Path, target: TargetSpec) -> None:
    """Raise a one-line ArtifactError if llama.cpp would refuse the draft's folder or misread it.

    The folder may have another project's names of settings; its plugin knows their meaning.
    """
    check_served("llama.cpp", (*_FLAWS, _WHOLE_TARGET), folder, target)
    planned = ServedFolder.planned(recognise(folder, target), target)
    if flaw := planned.first_of((*_FLAWS, *_TARGET_FLAWS)):
        raise ArtifactError(f"draft {folder} cannot be served by llama.cpp: {flaw.problem}")


def check_llamacpp_export(folder: Path, target: TargetSpec) -> None:
    """Raise a one-line ArtifactError for a flaw of the draft itself, which no other target would cure."""
    check_served("llama.cpp", _FLAWS, folder, target)


def check_planned(draft: Draft, target: TargetSpec) -> None:
    """Raise ConfigError if llama.cpp cannot serve the exports of ``draft`` for ``target``."""
    if flaw := ServedFolder.planned(draft, target).first_of((*_FLAWS, *_TARGET_FLAWS)):
        raise ConfigError(flaw.problem)


def rope_of(fields: Json) -> Json:
    """Return the parameters of the draft's rotary embeddings, without null values."""
    rope: Any = fields.get("rope_parameters") or {}
    return {"rope_type": "default", **present(rope)}


def _is_chain(draft: ServedFolder) -> bool:
    return CHAIN in draft.architectures


def _is_head(draft: ServedFolder) -> bool:
    return HEAD in draft.architectures


def _rope_is_unknown(draft: ServedFolder) -> bool:
    if _is_head(draft):  # it rotates as its target does, by the settings of the target's file
        return False
    rope = rope_of(draft.fields)
    known = {"default", "linear", *(("llama3",) if _is_chain(draft) else ())}
    return rope["rope_type"] not in known or rope.get("partial_rotary_factor", 1) != 1


def _lattice_is_too_wide(draft: ServedFolder) -> bool:
    candidates = draft.nested("dflash_config", "selector_top_k")
    width = draft.fields.get("hidden_size")
    return (
        SELECTOR_BLOCK in draft.architectures
        and isinstance(candidates, int)
        and isinstance(width, int)
        and width < candidates * (candidates + 1)
    )


_FLAWS = (
    Flaw(
        "its matrices are quantised as vLLM reads them; write a GGUF file of the draft as it was trained (q8_0)",
        lambda draft: QUANTISATION in draft.fields,
    ),
    Flaw(
        "it is in the layout of speculators; write it in the engines' own layout (spec-trainer convert)",
        lambda draft: "speculators_model_type" in draft.fields,
    ),
    Flaw(
        "it guesses a chain in one pass (P-EAGLE), for which llama.cpp has no graph; train an Eagle3 draft",
        lambda draft: (
            draft.architectures.isdisjoint(METHODS.keys() - {CHAIN})
            and parallel_mask_token(draft.fields) is not None
        ),
    ),
    Flaw(
        "it has EAGLE 3.1's norms, which llama.cpp drops without a word; train it with draft.fc_norm=false "
        "draft.norm_output=false",
        lambda draft: bool(
            _is_chain(draft) and (draft.fields.get("fc_norm") or draft.fields.get("norm_output"))
        ),
    ),
    Flaw(
        "it norms all captured states together (norm_before_fc), which cannot be written as GGUF; serve it with vLLM",
        lambda draft: bool(_is_chain(draft) and draft.fields.get("norm_before_fc")),
    ),
    Flaw(
        "it has several layers, and llama.cpp runs one layer of an Eagle3 draft",
        lambda draft: _is_chain(draft) and draft.fields.get("num_hidden_layers") != 1,
    ),
    Flaw(
        f"llama.cpp captures exactly {CAPTURED} layers for an Eagle3 draft; set draft.layers to {CAPTURED} of them",
        lambda draft: _is_chain(draft) and draft.fields.get("num_aux_hidden_states", CAPTURED) != CAPTURED,
    ),
    Flaw(
        "it was trained with the target's embeddings of images, which llama.cpp does not give to a draft",
        lambda draft: draft.fields.get("image_embeddings") == "merged",
    ),
    Flaw(
        "it has sliding layers, or looks back alone inside a block, and llama.cpp was tried with full layers "
        "alone that look both ways",
        lambda draft: (
            "sliding_attention" in (draft.fields.get("layer_types") or ())
            or draft.fields.get("is_causal") is True
        ),
    ),
    Flaw(
        "its Markov head is not vanilla, and llama.cpp knows that one alone",
        lambda draft: draft.fields.get("markov_head_type", "vanilla") != "vanilla",
    ),
)
_WHOLE_TARGET = Flaw(
    "it is a whole target, which llama.cpp's own converter turns into GGUF, with its MTP head",
    lambda draft: _is_head(draft) and any(not name.startswith("mtp.") for name in draft.tensors),
)
_TARGET_FLAWS = (
    Flaw(
        "its architecture is none of those that can be written as a GGUF file of its own (Eagle3, DFlash, DFlash2, "
        "DSpark, the MTP head of a dense Qwen3.5); another MTP head goes into its target (spec-trainer export "
        "--whole-target), which llama.cpp's own converter turns into GGUF",
        lambda draft: draft.architectures.isdisjoint(METHODS),
    ),
    Flaw(
        "llama.cpp captures no layers of a target of this type, and ends at the first request (it captures those of "
        f"{', '.join(sorted(WITH_CAPTURE))})",
        lambda draft: draft.target.model_type not in WITH_CAPTURE,
    ),
    Flaw(
        f"llama.cpp runs such an MTP head beside a target of type {HEAD_TARGET} alone",
        lambda draft: _is_head(draft) and draft.target.model_type != HEAD_TARGET,
    ),
    Flaw(
        "its target scales embeddings, and llama.cpp gives a block draft the embeddings unscaled",
        lambda draft: draft.target.embedding_scale != 1 and not _is_chain(draft),
    ),
    Flaw(
        "its rotary embeddings have a type or a share of channels that cannot be written for this draft (default and "
        "linear can, and llama3 for Eagle3)",
        _rope_is_unknown,
    ),
    Flaw(
        "its width is less than draft.selector_top_k · (draft.selector_top_k + 1), which llama.cpp needs; lower "
        "draft.selector_top_k",
        _lattice_is_too_wide,
    ),
)
