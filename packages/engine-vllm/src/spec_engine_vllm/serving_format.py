"""The needs of vLLM 0.26 to 0.33 in a draft's folder, beyond what the draft's plugin has checked.

docs/evaluation.md has the table of fields and versions, and how each is known. A folder whose architecture is not
listed here is passed on unchecked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from spec_kit.drafting import Flaw, architectures, check_served, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_kit.drafting import ServedFolder

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_ANGELSLIM_LAYERS = "aux_hidden_states_layer_ids"
_CHAINS = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
"""One autoregressive layer; vLLM knows it by both names."""
_UNNAMED_CHAIN = "LlamaForCausalLM"
"""The same in EAGLE's own files, where a draft vocabulary marks it as no whole Llama. vLLM adds the prefix."""
_PARALLEL_CHAINS = frozenset({"PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"})
"""The same kind of layers, which guess all tokens in one pass where vLLM is told so."""
_BLOCKS = frozenset({"DFlashDraftModel"})
_MARKOV_BLOCKS = frozenset({"Qwen3DSparkModel"})
"""Blocks whose guesses are tied together by a Markov head."""
_UNNAMED_MARKOV_BLOCKS = frozenset({"DSparkDraftModel"})
"""SpecForge's name for the same, which vLLM takes for a part of a DeepSeek-V4 target."""
_FULL = "full_attention"
_SPECULATORS_BLOCKS = frozenset({"dflash"})
_SPECULATORS_MARKOV_BLOCKS = frozenset({"dspark"})
_SPECULATORS = "speculators_model_type"
"""Field of folders in the layout of the library ``speculators``."""


def check_vllm_folder(folder: Path, target: TargetSpec, *, is_cpu_build: bool = False) -> None:
    """Raise ArtifactError, one line, for a folder that vLLM would refuse or read differently."""
    check_served("vLLM", (*_FLAWS, _MIXED_LAYERS, _SECOND_RUNNER) if is_cpu_build else _FLAWS, folder, target)


def speculative_fields(folder: Path) -> dict[str, Any]:
    """Return fields of ``speculative_config`` that vLLM needs for the draft in a folder, beside method and model."""
    named = architectures(read_config(folder) or {})
    return {} if named.isdisjoint(_PARALLEL_CHAINS) else {"parallel_drafting": True}


def _is_chain(draft: ServedFolder) -> bool:
    if _SPECULATORS in draft.fields:  # vLLM translates the fields itself
        return False
    unnamed = _UNNAMED_CHAIN in draft.architectures and "draft_vocab_size" in draft.fields
    return unnamed or not draft.architectures.isdisjoint(_CHAINS | _PARALLEL_CHAINS)


def _has_no_mask_token(draft: ServedFolder) -> bool:
    places = (
        draft.nested("dflash_config", "mask_token_id"),
        *map(draft.fields.get, ("pard_token", "ptd_token_id")),
    )
    is_parallel = _SPECULATORS not in draft.fields and not draft.architectures.isdisjoint(_PARALLEL_CHAINS)
    return is_parallel and all(place is None for place in places)


def _is_block(draft: ServedFolder) -> bool:
    return _SPECULATORS not in draft.fields and not draft.architectures.isdisjoint(_BLOCKS | _MARKOV_BLOCKS)


def _is_markov_block(draft: ServedFolder) -> bool:
    return draft.fields.get(_SPECULATORS) in _SPECULATORS_MARKOV_BLOCKS or not draft.architectures.isdisjoint(
        _MARKOV_BLOCKS
    )


def _has_prefix(draft: ServedFolder) -> bool:
    known = _is_chain(draft) or _is_block(draft)
    return known and any(name.startswith("model.") for name in draft.tensors)


def _names_layers_elsewhere(draft: ServedFolder) -> bool:
    named = draft.nested("eagle_config", _LAYERS) or draft.fields.get(_ANGELSLIM_LAYERS)
    return _is_chain(draft) and bool(named) and not draft.fields.get(_LAYERS)


def _maps_whole_vocabulary(draft: ServedFolder) -> bool:
    whole = draft.fields.get("draft_vocab_size") in (None, draft.fields.get("vocab_size"))
    return _is_chain(draft) and "d2t" in draft.tensors and whole


def _loses_sight(draft: ServedFolder) -> bool:
    """Return whether full layers become causal: vLLM takes what is said of sliding layers for all of them."""
    kinds = draft.nested("transformer_layer_config", "layer_types") or [_FULL]
    is_block = draft.fields.get(_SPECULATORS) in _SPECULATORS_BLOCKS
    return (
        is_block
        and draft.fields.get("sliding_window_non_causal") is False
        and _FULL in cast("list[str]", kinds)
    )


_FLAWS = (
    Flaw(
        "its markov_head_type is not vanilla, and vLLM has a place for that head only; SGLang serves the others",
        lambda draft: (
            _is_markov_block(draft) and draft.fields.get("markov_head_type") not in (None, "vanilla")
        ),
    ),
    Flaw(
        "its architecture is DSparkDraftModel, which vLLM takes for a part of the target; write it in the engines' "
        "own layout (spec-trainer convert)",
        lambda draft: (
            _SPECULATORS not in draft.fields and not draft.architectures.isdisjoint(_UNNAMED_MARKOV_BLOCKS)
        ),
    ),
    Flaw(
        "it is in the layout of speculators, of which vLLM 0.26 takes each guess for the token after; write it in "
        "the engines' own layout (spec-trainer convert)",
        lambda draft: draft.fields.get(_SPECULATORS) in _SPECULATORS_MARKOV_BLOCKS,
    ),
    Flaw(
        "its full-attention layers look both ways inside a block, and vLLM reads sliding_window_non_causal=false of "
        "speculators as causal for all layers; write it in the engines' own layout (spec-trainer convert)",
        _loses_sight,
    ),
    Flaw(
        "its tensors have the prefix model., which vLLM adds itself; write their names without it",
        _has_prefix,
    ),
    Flaw(
        f"it names its layers in eagle_config or {_ANGELSLIM_LAYERS} only, where vLLM reads them as other layers or "
        f"not at all; write {_LAYERS} at the top level too, each one larger (spec-trainer convert)",
        _names_layers_elsewhere,
    ),
    Flaw(
        "it has a d2t although its vocabulary is the target's; vLLM has no place for it: remove it",
        _maps_whole_vocabulary,
    ),
    Flaw("its config.json has no pard_token, where vLLM looks for its mask token", _has_no_mask_token),
    Flaw(
        "its config.json has no dflash_config.mask_token_id, where vLLM looks for it",
        lambda draft: _is_block(draft) and draft.nested("dflash_config", "mask_token_id") is None,
    ),
    Flaw(
        "its config.json has no dflash_config.target_layer_ids, where vLLM looks for them",
        lambda draft: _is_block(draft) and not draft.nested("dflash_config", "target_layer_ids"),
    ),
)
_MIXED_LAYERS = Flaw(
    "it mixes sliding-window and full-attention layers, which needs vLLM's second model runner; vLLM's CPU build has "
    "the first one only",
    lambda draft: _is_block(draft) and len(set(draft.fields.get("layer_types") or ())) > 1,
)
_SECOND_RUNNER = Flaw(
    "its guesses are tied together by a Markov head, which needs vLLM's second model runner; vLLM's CPU build has "
    "the first one only",
    _is_markov_block,
)
