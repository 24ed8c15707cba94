"""Small targets and drafts of each kind that llama.cpp serves."""

# Of few tokens, a draft with random weights guesses some rightly.
SHAPE = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
RECURRENT = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
RECURRENT |= {f"linear_num_{kind}_heads": 4 for kind in ("key", "value")}
"""Sizes of the recurrent layers of Qwen3.5."""
BLOCK = {"block_size": 4, "num_layers": 2, "num_features": 3}
DRAFTS = {
    "eagle3": {"fc_norm": False, "norm_output": False},
    "dflash": BLOCK,
    "dflash2": {**BLOCK, "conv_group_size": 8, "selector_top_k": 4, "selector_rank": 32},
    "dspark": {**BLOCK, "markov_rank": 32},
}
