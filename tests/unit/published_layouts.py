"""Names, shapes and fields of drafts as others publish them, at a toy size."""

from dataclasses import dataclass, field
from typing import Any

WIDTH, INNER, VOCABULARY, KEPT, HEAD_DIM = 32, 48, 97, 40, 8
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-05, "max_position_embeddings": 256,
    "vocab_size": VOCABULARY, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "use_cache": True,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama", "mlp_bias": False, "num_hidden_layers": 1, "rope_theta": 10000.0}
QWEN3 = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2, "rope_scaling": None, "rope_theta": 10000.0}
NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": None}
SLIDING = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}
TAPS = [1, 3, 5]
"""Outputs of the target's layers; what enters the next layer has a number one higher."""
Shapes = dict[str, tuple[int, ...]]


def speculators(algorithm: str, tokens: int, layer: dict[str, Any], **fields: object) -> dict[str, Any]:
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
    }
    return {
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama"},
        },
        "speculators_model_type": algorithm,
        "transformer_layer_config": layer,
        **fields,
    }  # fmt: skip


def layer(name: str, inputs: int, *norms: str, heads: bool = False) -> Shapes:
    """Names and shapes of a decoder layer. ``norms``: those of the width; ``heads``: whether heads are normed."""
    rows = {"q": 4, "k": 2, "v": 2}
    return {
        **{f"{name}.self_attn.{kind}_proj.weight": (n * HEAD_DIM, inputs) for kind, n in rows.items()},
        f"{name}.self_attn.o_proj.weight": (WIDTH, 4 * HEAD_DIM),
        **({f"{name}.self_attn.{kind}_norm.weight": (HEAD_DIM,) for kind in "qk"} if heads else {}),
        f"{name}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{name}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{name}.mlp.down_proj.weight": (WIDTH, INNER),
        **{
            f"{name}.{norm}.weight": (WIDTH,)
            for norm in ("input_layernorm", "post_attention_layernorm", *norms)
        },
    }


def chain(first: str, *, heads: bool = False, **others: tuple[int, ...]) -> Shapes:
    """An Eagle3 draft of one layer, whose vocabulary is reduced."""
    return {
        "fc.weight": (WIDTH, 3 * WIDTH),
        **layer(first, 2 * WIDTH, "hidden_norm", heads=heads),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (KEPT, WIDTH),
        **{f"{name}.weight": shape for name, shape in others.items()},
    }


def block(prefix: str = "", **others: tuple[int, ...]) -> Shapes:
    """A draft of two layers that guesses blocks."""
    own = {"fc.weight": (WIDTH, 3 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    layers = layer("layers.0", WIDTH, heads=True) | layer("layers.1", WIDTH, heads=True)
    return {f"{prefix}{name}": shape for name, shape in (own | layers | others).items()}


CONVOLUTIONS = {
    f"layers.{index}.{part}_conv.{name}": shape
    for index in range(2)
    for part in ("attention", "mlp")
    for name, shape in {"base_kernel": (2, 2, WIDTH), "kernel_projection.weight": (16, WIDTH)}.items()
}
SELECTOR = {
    "candidate_selector.predecessor_codebook": (VOCABULARY, 6),
    "candidate_selector.successor_codebook": (VOCABULARY, 6),
    "candidate_selector.hidden_projection.weight": (6, WIDTH),
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
MARKOV = {
    "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def heads(rows: int) -> Shapes:
    return {
        "markov_head.markov_w1.weight": (VOCABULARY, 6),
        "markov_head.markov_w2.weight": (rows, 6),
        "confidence_head.proj.weight": (1, WIDTH + 6),
        "confidence_head.proj.bias": (1,),
    }


@dataclass(frozen=True)
class Layout:
    algorithm: str
    fields: dict[str, Any]
    shapes: Shapes
    copies: frozenset[str] = frozenset()
    """Copies of the target's embedding and head, which are not the draft's."""
    is_reduced: bool = False
    changed: dict[str, Any] = field(default_factory=dict)
    """Fields that a converted folder has otherwise, because engines read them in another way or not at all."""


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
LAYOUTS = {
    "EAGLE, Llama 3.1 8B": Layout(
        "eagle3",
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": KEPT, "torch_dtype": "float16",
         "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "tie_word_embeddings": False},
        chain("midlayer"),
        is_reduced=True,
        changed={"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"},
    ),
    "SpecForge, Qwen3 8B": Layout(
        "eagle3",
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KEPT, "rope_scaling": None,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}, "fc_norm": True, "norm_output": True},
        chain("midlayer", **{f"fc_norm.{index}": (WIDTH,) for index in range(3)}),
        is_reduced=True,
        changed={"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": TAPS}},
    ),
    "AngelSlim, Qwen3 1.7B": Layout(
        "eagle3",
        {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": KEPT, "max_window_layers": 28,
         "aux_hidden_states_layer_ids": TAPS, "sliding_window": None, "use_sliding_window": False},
        chain("midlayer", embed_tokens=(VOCABULARY, WIDTH)),
        frozenset({EMBEDDING}),
        is_reduced=True,
        changed={"architectures": ["LlamaForCausalLMEagle3"]},
    ),
    "Model-Optimizer, gpt-oss 120B": Layout(
        "eagle3",
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None, "tie_word_embeddings": False,
         "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": TAPS, "use_aux_hidden_state": True, "next_layer_regular": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}},
        {name: shape for name, shape in chain("layers.0").items() if name != "lm_head.weight"},
        changed={"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": TAPS}},
    ),
    "RedHat, Qwen3 8B": Layout(
        "eagle3",
        speculators("eagle3", 5, {**LLAMA, "rope_scaling": None, "pretraining_tp": 1}, norm_before_residual=True,
                    architectures=["Eagle3Speculator"], draft_vocab_size=KEPT, target_hidden_size=None,
                    has_no_defaults_at_init=False, speculators_version="0.1.0.dev42", torch_dtype="bfloat16"),
        chain("layers.0", embed_tokens=(VOCABULARY, WIDTH)),
        frozenset({EMBEDDING}),
        is_reduced=True,
    ),
    "speculators 0.9, Eagle3 with windows": Layout(
        "eagle3",
        speculators("eagle3", 5, {**LLAMA, **SLIDING, "layer_types": ["sliding_attention"]}, draft_vocab_size=KEPT,
                    architectures=["Eagle3DraftModel"], norm_before_residual=True),
        chain("layers.0"),
        is_reduced=True,
    ),
    "RedHat, gpt-oss 20B": Layout(
        "eagle3",
        speculators("eagle3", 3, LLAMA, norm_before_residual=True, norm_before_fc=True, draft_vocab_size=KEPT,
                    architectures=["Eagle3DraftModel"], eagle_aux_hidden_state_layer_ids=None,
                    embed_requires_grad=False, target_hidden_size=None),
        chain("layers.0", input_norm=(3 * WIDTH,)),
        is_reduced=True,
    ),
    "speculators, Eagle 3.1 with Qwen3's layers": Layout(
        "eagle3",
        speculators("eagle3", 5, {**QWEN3, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
                    architectures=["Eagle3DraftModel"], draft_vocab_size=KEPT, norm_before_residual=False,
                    norm_before_fc=False, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
        chain("layers.0", heads=True, **{f"fc_norm.{index}": (WIDTH,) for index in range(3)}),
        is_reduced=True,
    ),
    "z-lab, Qwen3 8B, DFlash": Layout(
        "dflash",
        {**QWEN3, "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 8, "dtype": "bfloat16",
         "dflash_config": {"mask_token_id": 90, "target_layer_ids": TAPS}, "tie_word_embeddings": False,
         "layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False},
        block(),
        changed={"dtype": "float32", "dflash_config": {
            "block_size": 4, "mask_token_id": 90, "target_layer_ids": TAPS}},
    ),
    "z-lab, Qwen3.5 4B, DFlash": Layout(
        "dflash",
        {**QWEN3, **NEW_ROPE, **SLIDING, "architectures": ["DFlashDraftModel"], "num_target_layers": 8,
         "dflash_config": {"block_size": 4, "mask_token_id": 90, "target_layer_ids": TAPS},
         "layer_types": ["sliding_attention", "full_attention"]},
        block("model."),
    ),
    "z-lab, Qwen3.8 27B, DFlash2": Layout(
        "dflash2",
        {**QWEN3, **NEW_ROPE, **SLIDING, "architectures": ["DFlash2DraftModel"], "num_target_layers": 8,
         "is_causal": False, "layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": False,
         "dflash_config": {"block_size": 4, "mask_token_id": 90, "target_layer_ids": TAPS, **DFLASH2}},
        block(**CONVOLUTIONS, **SELECTOR),
        changed={"dflash_config": {
            "block_size": 4, "mask_token_id": 90, "target_layer_ids": TAPS, "causal": False, **DFLASH2}},
    ),
    "DeepSpec, Qwen3 8B, DSpark": Layout(
        "dspark",
        {**QWEN3, **MARKOV, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_target_layers": 8,
         "mask_token_id": 90, "target_layer_ids": TAPS, "layer_types": ["full_attention"] * 2, "num_anchors": 512,
         "tie_word_embeddings": False},
        block(**heads(VOCABULARY), **{EMBEDDING: (VOCABULARY, WIDTH), HEAD: (VOCABULARY, WIDTH)}),
        frozenset({EMBEDDING, HEAD}),
    ),
    "RedHat, GLM 5.2, DSpark": Layout(
        "dspark",
        speculators("dspark", 3, {**QWEN3, **NEW_ROPE}, **MARKOV, architectures=["DSparkDraftModel"], block_size=4,
                    mask_token_id=90, draft_vocab_size=VOCABULARY, aux_hidden_state_layer_ids=[2, 4, 6],
                    max_anchors=1024, tie_word_embeddings=False),
        block(**heads(VOCABULARY)),
    ),
    "speculators, Llama 3.2 1B, DSpark": Layout(
        "dspark",
        speculators("dspark", 4, {**QWEN3, **SLIDING, "layer_types": ["sliding_attention"] * 2}, **MARKOV,
                    architectures=["DSparkDraftModel"], block_size=4, mask_token_id=90, draft_vocab_size=KEPT,
                    aux_hidden_state_layer_ids=[2, 4, 6], sample_from_anchor=True, sliding_window_non_causal=False),
        block(**heads(KEPT), **{EMBEDDING: (VOCABULARY, WIDTH), HEAD: (KEPT, WIDTH)}),
        frozenset({EMBEDDING}),
        is_reduced=True,
    ),
    "speculators, DFlash": Layout(
        "dflash",
        speculators("dflash", 3, {**QWEN3, **SLIDING, "layer_types": ["sliding_attention"] * 2}, block_size=4,
                    architectures=["DFlashDraftModel"], mask_token_id=90, draft_vocab_size=KEPT,
                    aux_hidden_state_layer_ids=[2, 4, 6], sample_from_anchor=False, sliding_window_non_causal=True),
        block(**{HEAD: (KEPT, WIDTH)}),
        is_reduced=True,
    ),
    "speculators, P-EAGLE": Layout(
        "peagle",
        speculators("peagle", 3, LLAMA, architectures=["PEagleDraftModel"], mask_token_id=90, draft_vocab_size=KEPT,
                    norm_before_residual=True, norm_before_fc=True, eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
        chain("layers.0", input_norm=(3 * WIDTH,)) | {"mask_hidden": (1, 1, 3 * WIDTH)},
        is_reduced=True,
    ),
}  # fmt: skip
