"""Exported drafts in the layouts of other projects: the same tensors, as their trainers write the folder."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from spec_kit.targets import read_target, read_target_tensors


def as_speculators(draft: Path, target: Path, output: Path, **changed: object) -> Path:
    """Write an exported DFlash draft as speculators does, with the target's embedding and head beside it."""
    output.mkdir()
    fields = json.loads((draft / "config.json").read_text())
    kept = {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
        "rope_parameters", "rope_theta", "layer_types", "sliding_window", "use_sliding_window",
    }  # fmt: skip
    layer = {key: fields[key] for key in kept & fields.keys()}
    method = {"proposal_type": "greedy", "speculative_tokens": fields["block_size"] - 1}
    theirs = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": fields["eagle_aux_hidden_state_layer_ids"],
        "block_size": fields["block_size"],
        "draft_vocab_size": fields.get("draft_vocab_size", fields["vocab_size"]),
        "dtype": fields["dtype"],
        "mask_token_id": fields["dflash_config"]["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        **changed,
    }
    (output / "config.json").write_text(json.dumps(theirs))
    frozen = read_target_tensors(read_target(target))
    copies = {"embed_tokens.weight": frozen.embedding_VH.clone(), "lm_head.weight": frozen.head_VH.clone()}
    save_file(copies | load_file(draft / "model.safetensors"), output / "model.safetensors", {"format": "pt"})
    return output


def _without_ours(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an exported Eagle3 draft that other trainers write, too."""
    ours = ("norm_before_fc", "num_aux_hidden_states", "target_hidden_size",
            "eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_before_residual")  # fmt: skip
    return {key: value for key, value in fields.items() if key not in ours}


def as_specforge(draft: Path, target: Path, output: Path) -> Path:
    """Write an exported Eagle3 draft with the fields that SpecForge's draft configurations have; no layers named."""
    shutil.copytree(draft, output)
    theirs = _without_ours(json.loads((draft / "config.json").read_text())) | {
        "pretraining_tp": 1,
        "use_cache": True,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,  # copied from a small target; the draft's head is its own
        "transformers_version": "4.57.1",
    }
    (output / "config.json").write_text(json.dumps(theirs))
    return output


def as_angelslim(draft: Path, target: Path, output: Path) -> Path:
    """Write an exported Eagle3 draft as AngelSlim does: a name and a list of layers of its own, and the embedding."""
    output.mkdir()
    fields = json.loads((draft / "config.json").read_text())
    theirs = _without_ours(fields) | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "aux_hidden_states_layer_ids": fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        "max_window_layers": 36,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "transformers_version": "4.51.0",
    }
    (output / "config.json").write_text(json.dumps(theirs))
    copy = {"embed_tokens.weight": read_target_tensors(read_target(target)).embedding_VH.clone()}
    save_file(load_file(draft / "model.safetensors") | copy, output / "model.safetensors", {"format": "pt"})
    return output
