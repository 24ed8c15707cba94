"""Exports of untrained drafts, and changes to them."""

import json

LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
}  # fmt: skip
SMALL_SELECTOR = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}
OPTIONS = {
    "eagle3": {},
    "eagle3, every option": {"vocab_size": 40, "layers": (1, 3, 6), "fc_norm": True, "norm_output": True},
    "eagle3, two layers": {"num_layers": 2},
    "eagle3, mla": {"attention": "mla", "vocab_size": 40, **LATENT},
    "dflash": {"block_size": 4, "num_layers": 2, "num_features": 3},
    "dflash, sliding": {"block_size": 4, "num_layers": 2, "sliding_window": 8},
    "dflash, reduced": {"block_size": 4, "num_layers": 2, "vocab_size": 40},
    "dflash, mixed": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 16},
    "dflash2": {"block_size": 4, "num_layers": 2, **SMALL_SELECTOR},
    "dflash2, reduced": {"block_size": 4, "num_layers": 2, **SMALL_SELECTOR, "vocab_size": 40},
    "lilicorr": {"block_size": 4, "num_layers": 2, "lilicorr_hidden_size": 16},
    "dspark": {"block_size": 3, "num_layers": 2, "markov_rank": 8},
    "peagle": {"num_layers": 2, "vocab_size": 40},
}


def edit(folder, changes):
    """None removes a field, also of a nested object."""
    file = folder / "config.json"
    file.write_text(json.dumps(merged(json.loads(file.read_text()), changes)))


def merged(fields, changes):
    found = dict(fields)
    for key, value in changes.items():
        found[key] = merged(fields[key], value) if isinstance(value, dict) else value
        if value is None:
            del found[key]
    return found


class TargetFolder:
    """A target that is asked for its folder and its class only."""

    folder = "/models/my target"
    architecture = "LlamaForCausalLM"
