"""Build the vLLM command that serves a draft, and check the draft's folder for vLLM 0.26 to 0.33.

The draft's plugin has already checked the folder. docs/evaluation.md has the table of fields and versions,
and the source of each entry. A folder whose architecture is not listed here is not checked.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from spec_core.errors import ConfigError
from spec_kit.drafting import (
    QUANTISATION,
    Flaw,
    ServedFolder,
    architectures,
    check_served,
    parallel_mask_token,
    read_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from spec_core import Draft, TargetSpec
    from spec_kit.drafting import Json
    from spec_kit.hosting import SpeculativeMode

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_ANGELSLIM_LAYERS = "aux_hidden_states_layer_ids"
_LATENT_CHAINS = frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"})
"""Architecture names of autoregressive drafts of one layer with multi-head latent attention. vLLM knows both
names."""
_CHAINS = _LATENT_CHAINS | {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"}
"""Architecture names of autoregressive drafts: of Llama's layers, of Qwen3's, and with latent attention."""
_UNNAMED_CHAIN = "LlamaForCausalLM"
"""Name of an autoregressive draft in EAGLE's own files; the field ``draft_vocab_size`` distinguishes it from a
whole Llama model. vLLM adds the prefix ``Eagle3``."""
_PARALLEL_CHAINS = frozenset({"PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"})
"""Architecture names of drafts of Llama layers that guess all tokens in one pass, with ``parallel_drafting``.
vLLM registers these names, but then puts ``Eagle3`` before them and does not find the result. A folder that
vLLM can serve has a name of ``_CHAINS`` and a mask token."""
_BLOCKS = frozenset({"DFlashDraftModel"})
_MARKOV_BLOCKS = frozenset({"Qwen3DSparkModel"})
"""Architecture names of block drafts whose guesses depend on each other through a Markov head."""
_SELECTOR_BLOCKS, _PATH_BLOCKS = frozenset({"DFlash2DraftModel"}), frozenset({"LiLiCorrDraftModel"})
"""Architecture names of block drafts whose guesses are chosen among candidates, by a selector or as a path."""
_TEXT_HEADS = frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"})
"""Architecture names of text-only targets with an MTP head."""
_UNNAMED_MARKOV_BLOCKS = frozenset({"DSparkDraftModel"})
"""SpecForge's name for a block draft with a Markov head; vLLM mistakes it for a part of a DeepSeek-V4 target."""
_FULL = "full_attention"
_SPECULATORS_PARALLEL_CHAINS = frozenset({"peagle"})
_SPECULATORS_BLOCKS = frozenset({"dflash", "dflash2"})
_SPECULATORS_MARKOV_BLOCKS = frozenset({"dspark"})
_SPECULATORS_CHAINS = frozenset({"eagle3"}) | _SPECULATORS_PARALLEL_CHAINS
_SPECULATORS = "speculators_model_type"
"""Field of config.json in folders with the layout of the library ``speculators``."""


_MOST_REQUESTS = 4096
"""Number of concurrent requests that no server reaches; the last range of numbers of requests ends there."""
_CPU_MEMORY = ("--kv-cache-memory-bytes", "4G")
"""Flags by which the CPU build allocates a fixed cache of keys and values."""


def speculative_config(mode: SpeculativeMode) -> dict[str, Any]:
    """Return the ``speculative_config`` that makes vLLM speculate with the draft of ``mode``."""
    fields = read_config(mode.folder) or {}
    return {
        "method": mode.method,
        "model": str(mode.folder),
        "num_speculative_tokens": mode.num_draft_tokens,
        **({"parallel_drafting": True} if _guesses_in_one_pass(fields) else {}),
    }


def speculation_by_load(
    mode: SpeculativeMode, draft_tokens: Mapping[int, int], *, verifies_adaptively: bool
) -> dict[str, Any]:
    """Return the fields of ``speculative_config`` by which vLLM changes the number of draft tokens with its load.

    ``draft_tokens``: see ``spec_core.Serving.command_by_load``. ``verifies_adaptively``: whether vLLM may choose how
    many guesses of a DSpark block it verifies, from its own estimate of their acceptance and of the time.
    Raise ConfigError for a draft that vLLM runs with one number only.
    """
    fields = read_config(mode.folder) or {}
    if _guesses_in_one_pass(fields):
        raise ConfigError("vLLM lays out the rounds of P-EAGLE for one number of draft tokens")
    if verifies_adaptively and not architectures(fields).isdisjoint(_MARKOV_BLOCKS):
        return {"enable_adaptive_verification": True}
    starts = list(draft_tokens)
    ends = [*(start - 1 for start in starts[1:]), max(_MOST_REQUESTS, starts[-1])]
    ranges = [list(entry) for entry in zip(starts, ends, draft_tokens.values(), strict=True)]
    return {"num_speculative_tokens_per_batch_size": ranges}


def has_confidence_head(folder: Path) -> bool:
    """Return whether the draft predicts the acceptance of its guesses."""
    return (read_config(folder) or {}).get("enable_confidence_head") is True


def vllm_command(
    target: TargetSpec,
    mode: SpeculativeMode,
    *,
    is_cpu_build: bool = False,
    by_load: Mapping[str, Any] | None = None,
) -> str:
    """Return the shell command of a server that speculates with the draft of ``mode``.

    ``by_load``: further fields of the ``speculative_config`` (see ``speculation_by_load``).

    The CPU build gets another command, because its ``vllm`` command does not start and it has no CUDA graphs.
    By default it claims 92 % of the host's memory, and ends if other processes use more than the rest.
    """
    drafting = ["--speculative-config", json.dumps(speculative_config(mode) | dict(by_load or {}))]
    return shlex.join([*serve_words(target.folder, is_cpu_build=is_cpu_build), *drafting])


def serve_words(model: Path, *, is_cpu_build: bool) -> list[str]:
    """Return the words of a command that serves ``model``."""
    cpu = ["python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *_CPU_MEMORY, "--model"]
    return [*(cpu if is_cpu_build else ["vllm", "serve"]), str(model)]


def check_vllm_folder(
    folder: Path,
    target: TargetSpec,
    *,
    is_cpu_build: bool = False,
    is_before_28: bool = False,
    has_first_runner: bool = True,
) -> None:
    """Raise a one-line ArtifactError if vLLM would refuse the folder or misread it."""
    flaws = [*_FLAWS]
    flaws += _BEFORE_28 if is_before_28 else ()
    flaws += (_NO_LATENT_ON_CPU,) if is_cpu_build and is_before_28 else ()
    flaws += _ON_CPU if is_cpu_build else ()
    flaws += () if has_first_runner else (_NEEDS_FIRST_RUNNER,)
    check_served("vLLM", flaws, folder, target)


def vllm_problem(draft: Draft, target: TargetSpec) -> str | None:
    """Return why no supported vLLM serves the exports of ``draft``; None if one does."""
    return _problem(draft, target, _FLAWS)


def version_need(draft: Draft, target: TargetSpec, *, is_cpu_build: bool) -> tuple[str, str] | None:
    """Return from which vLLM on (or CPU build) the exports of ``draft`` are served, and why; None for every one."""
    on_cpu = (_NO_LATENT_ON_CPU,) if is_cpu_build else ()
    for version, flaws in (("0.31", (_UNKNOWN_PATH,)), ("0.28", (*_BEFORE_28, *on_cpu))):
        if problem := _problem(draft, target, flaws):
            return version, problem
    return None


def problem_on_cpu(draft: Draft, target: TargetSpec) -> str | None:
    """Return why no CPU build of vLLM serves the exports of ``draft``; None if one does."""
    return _problem(draft, target, _ON_CPU)


def problem_without_first_runner(draft: Draft, target: TargetSpec) -> str | None:
    """Return why a vLLM without its first model runner does not serve the exports of ``draft``; None if it does."""
    return _problem(draft, target, (_NEEDS_FIRST_RUNNER,))


def _problem(draft: Draft, target: TargetSpec, flaws: Iterable[Flaw]) -> str | None:
    flaw = ServedFolder.planned(draft, target).first_of(flaws)
    return None if flaw is None else flaw.problem


def _guesses_in_one_pass(fields: Json) -> bool:
    """Return whether the draft needs ``parallel_drafting``, which vLLM does not read from folders."""
    if _SPECULATORS in fields:
        return fields[_SPECULATORS] in _SPECULATORS_PARALLEL_CHAINS
    named = architectures(fields)
    is_chain = not named.isdisjoint(_CHAINS) and parallel_mask_token(fields) is not None
    return is_chain or not named.isdisjoint(_PARALLEL_CHAINS)


def _is_chain(draft: ServedFolder) -> bool:
    if _SPECULATORS in draft.fields:  # vLLM translates the fields itself
        return False
    unnamed = _UNNAMED_CHAIN in draft.architectures and "draft_vocab_size" in draft.fields
    return unnamed or not draft.architectures.isdisjoint(_CHAINS | _PARALLEL_CHAINS)


def _has_no_mask_token(draft: ServedFolder) -> bool:
    """Return whether an autoregressive draft has a mask state, which makes it P-EAGLE, but no mask token."""
    return _is_chain(draft) and "mask_hidden" in draft.tensors and parallel_mask_token(draft.fields) is None


def _has_prefixed_name(draft: ServedFolder) -> bool:
    return _is_chain(draft) and not draft.architectures.isdisjoint(_PARALLEL_CHAINS)


def _is_latent_chain(draft: ServedFolder) -> bool:
    return not draft.architectures.isdisjoint(_LATENT_CHAINS)


def _is_plainly_rotated(draft: ServedFolder) -> bool:
    """Return whether rotary embeddings are unscaled.

    Folders store the parameters of rotary embeddings, and their type, under one of two field names.
    """
    rope: Any = draft.fields.get("rope_parameters") or draft.fields.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type", "default")) == "default"


def _is_block(draft: ServedFolder) -> bool:
    known = _BLOCKS | _MARKOV_BLOCKS | _SELECTOR_BLOCKS | _PATH_BLOCKS
    return _SPECULATORS not in draft.fields and not draft.architectures.isdisjoint(known)


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
    return (_is_chain(draft) or _is_block(draft)) and "d2t" in draft.tensors and whole


def _loses_sight(draft: ServedFolder) -> bool:
    """Return whether vLLM would make layers causal that look both ways inside a block.

    Of DFlash it takes a field that is meant for sliding layers as all layers', of DSpark it does not read the field.
    """
    algorithm = draft.fields.get(_SPECULATORS)
    looks = draft.fields.get("sliding_window_non_causal")
    kinds: Any = draft.nested("transformer_layer_config", "layer_types") or [_FULL]
    if algorithm in _SPECULATORS_BLOCKS:
        return looks is False and _FULL in kinds
    return algorithm in _SPECULATORS_MARKOV_BLOCKS and looks is not False and "sliding_attention" in kinds


_FLAWS = (
    Flaw(
        "it was trained with the target's embeddings of images (image_embeddings=merged), and vLLM gives it the "
        "placeholder's; serve it with SGLang, or train on with draft.image_embeddings=placeholder",
        lambda draft: draft.fields.get("image_embeddings") == "merged",
    ),
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
        "it is in the layout of speculators, in which vLLM gives a chain layers of llama or qwen3; write it in the "
        "engines' own layout",
        lambda draft: (
            draft.fields.get(_SPECULATORS) in _SPECULATORS_CHAINS
            and draft.nested("transformer_layer_config", "model_type") not in (None, "llama", "qwen3")
        ),
    ),
    Flaw(
        "some of its layers look both ways inside a block, and vLLM, as it reads sliding_window_non_causal of "
        "speculators, makes them causal; write it in the engines' own layout (spec-trainer convert)",
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
    Flaw(
        "its model_type is deepseek_v3, with which vLLM takes it for the MTP head of a target; write deepseek_v2 "
        "(spec-trainer convert)",
        lambda draft: _is_latent_chain(draft) and draft.fields.get("model_type") == "deepseek_v3",
    ),
    Flaw(
        "its matrices are quantised and it has latent attention, which were not tried in vLLM together; export it "
        "without --dtype",
        lambda draft: QUANTISATION in draft.fields and _is_latent_chain(draft),
    ),
    Flaw(
        "it chooses from a reduced vocabulary, of which vLLM takes a candidate's row for its token; train it without "
        "draft.vocab_size, or serve it with llama.cpp",
        lambda draft: "d2t" in draft.tensors and not draft.architectures.isdisjoint(_SELECTOR_BLOCKS),
    ),
    Flaw("its config.json has no pard_token, where vLLM looks for its mask token", _has_no_mask_token),
    Flaw(
        "its architecture is P-EAGLE's own name, before which vLLM puts Eagle3 and then does not know it; name it "
        "LlamaForCausalLMEagle3 (spec-trainer convert)",
        _has_prefixed_name,
    ),
    Flaw(
        "its config.json has no dflash_config.mask_token_id, where vLLM looks for it",
        lambda draft: _is_block(draft) and draft.nested("dflash_config", "mask_token_id") is None,
    ),
    Flaw(
        "its config.json has no dflash_config.target_layer_ids, where vLLM looks for them",
        lambda draft: _is_block(draft) and not draft.nested("dflash_config", "target_layer_ids"),
    ),
)
_PLAIN_ROTATION = Flaw(
    "its latent attention has plain rotary embeddings, which vLLM before 0.28 takes for YaRN without a factor, and "
    "stops; write them as YaRN of factor 1 (spec-trainer convert)",
    lambda draft: _is_latent_chain(draft) and _is_plainly_rotated(draft),
)
_NO_LATENT_ON_CPU = Flaw(
    "it has multi-head latent attention, which vLLM's CPU build has from 0.28 on", _is_latent_chain
)
_ON_CPU = (
    Flaw(
        "it has multi-head latent attention and the target has another one, which vLLM's CPU build does not serve "
        "together: their kernels share no size of cache blocks",
        lambda draft: _is_latent_chain(draft) and draft.target.latent is None,
    ),
    Flaw(
        "vLLM's CPU build has latent attention with kv_lora_rank=512 and qk_rope_head_dim=64 alone",
        lambda draft: (
            _is_latent_chain(draft)
            and (draft.fields.get("kv_lora_rank"), draft.fields.get("qk_rope_head_dim")) != (512, 64)
        ),
    ),
    Flaw(
        "it mixes sliding-window and full-attention layers, which needs vLLM's second model runner; vLLM's CPU build "
        "has the first one only",
        lambda draft: _is_block(draft) and len(set(draft.fields.get("layer_types") or ())) > 1,
    ),
    Flaw(
        "its guesses are tied together by a Markov head, which needs vLLM's second model runner; vLLM's CPU build "
        "has the first one only",
        _is_markov_block,
    ),
    Flaw(
        "its guesses are chosen among candidates, which needs vLLM's second model runner; vLLM's CPU build has the "
        "first one only",
        lambda draft: not draft.architectures.isdisjoint(_SELECTOR_BLOCKS | _PATH_BLOCKS),
    ),
)
"""Flaws that only vLLM's CPU build has, in each version."""
_NEEDS_FIRST_RUNNER = Flaw(
    "it guesses its chain in one pass, which needs vLLM's first model runner, and the installed vLLM has the second "
    "one only; serve it with vLLM 0.33 or older, or train a dflash or dspark draft",
    lambda draft: _guesses_in_one_pass(draft.fields),
)
_UNKNOWN_SELECTOR = Flaw(
    "its architecture is DFlash2DraftModel, which vLLM knows from 0.28 on; earlier ones draft as DFlash, without the "
    "selector and the convolutions",
    lambda draft: not draft.architectures.isdisjoint(_SELECTOR_BLOCKS),
)
_UNKNOWN_PATH = Flaw(
    "its architecture is LiLiCorrDraftModel, which vLLM knows from 0.31 on",
    lambda draft: not draft.architectures.isdisjoint(_PATH_BLOCKS),
)
_FOREIGN_SIZES = Flaw(
    "it has multi-head latent attention and the target has another one, whose sizes vLLM before 0.28 takes for the "
    "draft's, and stops",
    lambda draft: _is_latent_chain(draft) and draft.target.latent is None,
)
_UNKNOWN_TEXT_MODEL = Flaw(
    "its architecture is Qwen3_5ForCausalLM or Qwen3_5MoeForCausalLM, which vLLM 0.26 does not know: it has "
    "Qwen3.5 in the multimodal layout alone",
    lambda draft: not draft.architectures.isdisjoint(_TEXT_HEADS),
)
_ANCHOR = Flaw(
    "vLLM reads from 0.28 on whether the first slot of its blocks makes a guess (sample_from_anchor); earlier ones "
    "take each guess of such a folder for a neighbouring token",
    # They take it for true, and for false in the layout of speculators.
    lambda draft: (
        _is_markov_block(draft) and draft.fields.get("sample_from_anchor") is (_SPECULATORS in draft.fields)
    ),
)
_BEFORE_28 = (_ANCHOR, _UNKNOWN_SELECTOR, _PLAIN_ROTATION, _FOREIGN_SIZES, _UNKNOWN_TEXT_MODEL)
"""Flaws that only vLLM versions before 0.28 have."""
