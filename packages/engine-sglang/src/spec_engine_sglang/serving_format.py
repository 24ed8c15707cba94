"""Build SGLang's arguments for a draft, and check whether SGLang can serve the draft's folder.

The draft's plugin has already checked the folder. docs/evaluation.md has the table of fields and versions,
and the source of each entry. A folder whose architecture is not listed here is not checked. Sources:
``arg_groups/speculative_hook.py``, ``models/dflash.py``, ``models/llama_eagle3.py`` and
``models/kimi_k25_eagle3.py`` of 0.5.16 and 0.5.23.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_core import Draft, TargetSpec
from spec_core.errors import ArtifactError, ConfigError
from spec_kit.drafting import (
    QUANTISATION,
    Flaw,
    Json,
    ServedFolder,
    Size,
    architectures,
    check_served,
    checked,
    config_error,
    present,
    read_config,
    section,
)
from spec_kit.hosting import SpeculativeMode, probe_version

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_IMAGES = "image_embeddings"
"""Field with the embeddings at images that an autoregressive draft was trained with. No engine reads it."""
_CHAIN = "LlamaForCausalLMEagle3"
_LATENT_CHAIN = "Eagle3DeepseekV2ForCausalLM"
"""Architecture name of an autoregressive draft with multi-head latent attention."""
_VLLM_CHAINS = frozenset({"Eagle3LlamaForCausalLM", "Eagle3DeepseekV3ForCausalLM"})
"""Further names of autoregressive drafts, which only vLLM knows."""
_NORMED_CHAIN = "Eagle3Qwen3ForCausalLM"
"""Architecture name of an autoregressive draft with norms of queries and keys."""
_UNNAMED_CHAIN = "LlamaForCausalLM"
"""Name of an autoregressive draft in EAGLE's own files; the field ``draft_vocab_size`` distinguishes it from a
whole Llama model."""
_BLOCK = "DFlashDraftModel"
_MARKOV_BLOCK = "Qwen3DSparkModel"
"""Architecture name of a block draft whose first slot, the slot of the last known token, may make a guess, too."""
_SELECTOR_BLOCK = "DFlash2DraftModel"
"""Architecture name of a block draft whose guesses are chosen one after the other by a selector."""
_KNOWS_SELECTORS = ">=0.5.19"
_READS_ANCHORS = ">=0.5.19"
"""Versions that read whether a ``_MARKOV_BLOCK``'s first slot makes a guess; earlier ones assume that it does."""
_PATH_BLOCK = "LiLiCorrDraftModel"
"""Architecture name of a block draft whose guesses are a path through candidates."""
_KNOWS_PATHS = ">=0.5.22"
_SHIFTS_IMAGES = ">=0.5.20"
"""Versions that give a draft the embedding of each token, image tokens included, in the row before the token.
Earlier versions give it in the token's own row if the prompt has images (``_draft_extend_for_prefill`` of
``speculative/eagle_worker_v2.py``, read in 0.5.16, 0.5.19, 0.5.20 and 0.5.23)."""
_KNOWS_WINDOWS = ">=0.5.23"
"""Versions that certainly have a window for Eagle3, as a flag of the server; they read none from config.json."""
_TEXT_HEAD = "Qwen3_5ForCausalLM"
"""Architecture name of a Qwen3.5 without a section for vision, which may hold an MTP head."""
_KNOWS_TEXT_HEADS = ">=0.5.17"
_UNNAMED_MARKOV_BLOCK = "DSparkDraftModel"
"""SpecForge's name for ``Qwen3DSparkModel``. SGLang does not find the fields of such a folder."""
_ADAPTIVE_METHODS = frozenset({"EAGLE3", "NEXTN"})
"""Algorithms whose number of draft tokens SGLang can change with its load (0.5.16 to 0.5.23)."""
_READS_SWITCHES = ">=0.5.23"
"""Versions that certainly read a draft's ``is_causal`` and ``norm_before_fc``; 0.5.16 does not."""


def speculative_arguments(mode: SpeculativeMode) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` that make SGLang speculate with the draft of ``mode``."""
    # A block is drafted in one pass, a chain in one for each token.
    fields = _read(mode.folder)
    drafted = mode.num_draft_tokens
    steps = drafted if _block_size(mode.folder, fields) is None else 1
    # Else SGLang refuses fewer guesses than the draft's block has.
    own = {"speculative_dspark_block_size": drafted} if _MARKOV_BLOCK in architectures(fields) else {}
    if (window := _window(fields)) is not None:
        # SGLang counts the positions before the query's own.
        own["speculative_draft_window_size"] = window - 1
    return {
        "speculative_algorithm": mode.method,
        "speculative_draft_model_path": str(mode.folder),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        # A verification takes the last known token and all guesses.
        "speculative_num_draft_tokens": drafted + 1,
        **own,
    }


def sglang_command_by_load(target: TargetSpec, mode: SpeculativeMode, draft_tokens: Mapping[int, int]) -> str:
    """Return the shell command that writes SGLang's adaptive file beside the draft, and starts SGLang with it.

    ``draft_tokens``: see ``spec_core.Serving.command_by_load``. Raise ConfigError for a draft with which SGLang has
    one number of draft tokens only.
    """
    if mode.method not in _ADAPTIVE_METHODS:
        raise ConfigError("SGLang adapts the number of draft tokens with Eagle3 and MTP alone")
    file = f"{mode.folder}.adaptive.json"
    # A list of one number leaves SGLang no choice within a load.
    steps = {str(start): {"candidate_steps": [number]} for start, number in draft_tokens.items()}
    write = shlex.join(["printf", "%s", json.dumps(steps)])
    flags = shlex.join(["--speculative-adaptive", "--speculative-adaptive-config", file])
    return f"{write} > {shlex.quote(file)} && {sglang_command(target, mode)} {flags}"


def sglang_command(target: TargetSpec, mode: SpeculativeMode) -> str:
    """Return the shell command of a server that speculates with the draft of ``mode``."""
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in speculative_arguments(mode).items()}
    words = [word for flag in flags.items() for word in flag]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", str(target.folder), *words])


def check_sglang_folder(folder: Path, target: TargetSpec) -> None:
    """Raise a one-line ArtifactError if any SGLang from 0.5.16 on would refuse the folder or misread it."""
    check_served("SGLang", _FLAWS, folder, target)


def image_warning(folder: Path, target: TargetSpec) -> str | None:
    """Return a warning if SGLang gives the draft other embeddings of images than training did; else None."""
    if target.image_token_id is None or _read(folder).get(_IMAGES) != "placeholder":
        return None
    return (
        "this draft was trained with the placeholder's embeddings at images (draft.image_embeddings=placeholder), "
        "and SGLang gives it the target's: guesses on prompts with images may be worse there, not those on text"
    )


def check_speculation(folder: Path, num_draft_tokens: int) -> None:
    """Raise ArtifactError if the installed SGLang would not serve the folder as it was trained.

    Raise ConfigError for more draft tokens than the draft can propose.
    """
    fields = _read(folder)
    if problem := unread_switch(fields):
        raise config_error(folder, problem)
    for versions, problem in version_needs(fields):
        if not probe_version(versions, "sglang").ok:
            raise config_error(folder, problem)
    most = _most_guesses(folder, fields)
    if num_draft_tokens < 1 or (most is not None and num_draft_tokens > most):
        named = "or more" if most is None else f"to {most}"
        raise ConfigError(f"{num_draft_tokens} draft tokens are wanted, draft {folder} proposes 1 {named}")


def sglang_problem(draft: Draft, target: TargetSpec) -> str | None:
    """Return why no supported SGLang serves the exports of ``draft``, or None."""
    planned = ServedFolder.planned(draft, target)
    flaw = planned.first_of(_FLAWS)
    return unread_switch(planned.fields) if flaw is None else flaw.problem


def unread_switch(fields: Json) -> str | None:
    """Return which field of config.json no SGLang reads, although the draft was trained with it; else None."""
    if _has_switches(fields) and fields.get("norm_before_residual"):
        return "norm_before_residual=true, which SGLang does not read"
    rope: Any = fields.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if _CHAIN in architectures(fields) and share not in (None, 1):
        return f"partial_rotary_factor={share}, but SGLang rotates all channels"
    return None


def version_needs(fields: Json) -> Iterator[tuple[str, str]]:
    """Yield versions of SGLang that a draft with this config.json needs, and why; the newest come first."""
    if _has_switches(fields):
        if fields.get("norm_before_fc"):
            yield _READS_SWITCHES, "norm_before_fc=true, which SGLang reads from 0.5.23 on"
        causal = fields.get("is_causal")
        layers = fields.get("layer_types") or ["full_attention"]
        if causal is not None and {kind == "sliding_attention" for kind in layers} != {causal}:
            yield (
                _READS_SWITCHES,
                f"is_causal={str(causal).lower()} with layer_types={layers}, but SGLang before 0.5.23 takes sliding "
                "layers as causal and full ones as not",
            )
    if _window(fields) is not None:
        yield _KNOWS_WINDOWS, f"sliding_window={_window(fields)}, which SGLang has for Eagle3 from 0.5.23 on"
    if fields.get(_IMAGES) == "merged":
        yield _SHIFTS_IMAGES, f"{_IMAGES}=merged, which SGLang serves as it was trained from 0.5.20 on"
    if _PATH_BLOCK in architectures(fields):
        yield _KNOWS_PATHS, f"architecture {_PATH_BLOCK}, whose tensors SGLang finds from 0.5.22 on"
    if _SELECTOR_BLOCK in architectures(fields):
        yield _KNOWS_SELECTORS, f"architecture {_SELECTOR_BLOCK}, which SGLang reads from 0.5.19 on"
    if _anchor_is_silent(fields):
        yield _READS_ANCHORS, "sample_from_anchor=false, which SGLang reads from 0.5.19 on"
    if _TEXT_HEAD in architectures(fields):
        yield _KNOWS_TEXT_HEADS, f"architecture {_TEXT_HEAD}, which SGLang reads from 0.5.17 on"


def _anchor_is_silent(fields: Json) -> bool:
    return _MARKOV_BLOCK in architectures(fields) and fields.get("sample_from_anchor") is False


def _window(fields: Json) -> int | None:
    """Return the number of positions to which a query of an autoregressive draft attends; None means all."""
    sliding = _CHAIN in architectures(fields) and "sliding_attention" in (fields.get("layer_types") or ())
    return fields.get("sliding_window") if sliding else None


def _has_switches(fields: Json) -> bool:
    known = {_CHAIN, _LATENT_CHAIN, _BLOCK, _MARKOV_BLOCK, _SELECTOR_BLOCK}
    return not architectures(fields).isdisjoint(known)


def _read(folder: Path) -> Json:
    fields = read_config(folder)
    if fields is None:
        raise ArtifactError(f"draft {folder} has no config.json")
    return present(fields)


def _block_size(folder: Path, fields: Json) -> int | None:
    if "dflash_config" not in fields:
        return None
    own = section(fields, "dflash_config", folder)
    # SGLang's own default, where neither place has one.
    return checked(Size, own.get("block_size", fields.get("block_size", 16)), folder, "block_size")


def _most_guesses(folder: Path, fields: Json) -> int | None:
    """Return the number of guesses of a block draft; None for an autoregressive draft.

    The first slot of a DFlash block makes no guess, and that of a DSpark block perhaps none.
    """
    block_size = _block_size(folder, fields)
    guesses_first = _MARKOV_BLOCK in architectures(fields) and not _anchor_is_silent(fields)
    return block_size if block_size is None or guesses_first else block_size - 1


def _is_chain(draft: ServedFolder) -> bool:
    return not draft.architectures.isdisjoint({_CHAIN, _LATENT_CHAIN})


def _is_misnamed_chain(draft: ServedFolder) -> bool:
    named = draft.architectures
    unnamed = _UNNAMED_CHAIN in named and "draft_vocab_size" in draft.fields
    return not _is_chain(draft) and (not named.isdisjoint(_VLLM_CHAINS) or unnamed)


def _is_block(draft: ServedFolder) -> bool:
    return not draft.architectures.isdisjoint({_BLOCK, _MARKOV_BLOCK, _SELECTOR_BLOCK, _PATH_BLOCK})


def _names_layers_at_top_only(draft: ServedFolder) -> bool:
    """Return whether SGLang would capture other layers than the draft's top-level list names.

    SGLang reads the nested list alone. Without it, SGLang captures default layers, which may equal the
    top-level list by chance.
    """
    depth = draft.target.num_layers
    read_otherwise = draft.fields.get(_LAYERS) not in (None, [2, depth // 2, depth - 3])
    return _is_chain(draft) and not draft.nested("eagle_config", _LAYERS) and read_otherwise


def _has_reduced_blocks(draft: ServedFolder) -> bool:
    return _is_block(draft) and draft.fields.get("draft_vocab_size") not in (
        None,
        draft.fields.get("vocab_size"),
    )


def _lacks_target_depth(draft: ServedFolder) -> bool:
    named = (draft.fields.get("num_target_layers"), draft.nested("dflash_config", "num_target_layers"))
    return _is_block(draft) and named == (None, None)


_FLAWS = (
    Flaw(
        "its matrices are quantised: SGLang has guessed with such drafts as if they were not (issue 39087), and was "
        "not tried with this one's layout; export it without --dtype, or serve it with vLLM",
        lambda draft: QUANTISATION in draft.fields,
    ),
    Flaw(
        "it has latent attention in several layers, and SGLang has one layer with it",
        lambda draft: _LATENT_CHAIN in draft.architectures and draft.fields.get("num_hidden_layers") != 1,
    ),
    Flaw(
        "it is in the layout of speculators, which SGLang does not read; write it in the engines' own layout "
        "(spec-trainer convert)",
        lambda draft: "speculators_model_type" in draft.fields,
    ),
    Flaw(
        f"its queries and keys are normed ({_NORMED_CHAIN}), for which SGLang has no class; serve it with vLLM",
        lambda draft: _NORMED_CHAIN in draft.architectures,
    ),
    Flaw(
        f"its architecture has a name that SGLang does not know; SGLang serves the same draft as {_CHAIN}, or as "
        f"{_LATENT_CHAIN} if its attention is latent",
        _is_misnamed_chain,
    ),
    Flaw(
        f"its architecture is {_UNNAMED_MARKOV_BLOCK}, whose fields lie where SGLang does not look; write it in the "
        "engines' own layout (spec-trainer convert)",
        lambda draft: _UNNAMED_MARKOV_BLOCK in draft.architectures,
    ),
    Flaw(
        "its config.json has no markov_head_type, which SGLang needs",
        lambda draft: _MARKOV_BLOCK in draft.architectures and draft.fields.get("markov_head_type") is None,
    ),
    Flaw(
        "its config.json has no draft_vocab_size, which SGLang needs also where it is the target's",
        lambda draft: _is_chain(draft) and draft.fields.get("draft_vocab_size") is None,
    ),
    Flaw(
        "it guesses blocks from a reduced vocabulary, and SGLang takes the target's whole head for such a draft; "
        "train it without draft.vocab_size, or serve it with vLLM or llama.cpp",
        _has_reduced_blocks,
    ),
    Flaw(
        "its config.json has tie_word_embeddings=true, for which SGLang takes the embedding in place of the draft's "
        "own head; write false (spec-trainer convert)",
        lambda draft: _is_chain(draft) and draft.fields.get("tie_word_embeddings") is True,
    ),
    Flaw(
        f"it names its layers at the top level only, which SGLang does not read; write {_LAYERS} into "
        "eagle_config too, each one smaller",
        _names_layers_at_top_only,
    ),
    Flaw(
        "its config.json has no dflash_config.mask_token_id, where SGLang looks for it",
        lambda draft: _is_block(draft) and draft.nested("dflash_config", "mask_token_id") is None,
    ),
    Flaw(
        "its config.json has no num_target_layers; SGLang 0.5.16 takes the draft's own number of layers instead",
        _lacks_target_depth,
    ),
)
