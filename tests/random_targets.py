"""Tiny targets with random weights, equal in every process."""

from pathlib import Path

_COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.25, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_SHAPES = {
    # Gemma multiplies embeddings by sqrt(H), norms by (1 + weight), and caps its logits.
    "gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 64, "tie_word_embeddings": True},
    "gpt2": {
        "vocab_size": 97, "n_embd": 32, "n_layer": 8, "n_head": 4, "n_positions": 256,
        "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


def save_random_target(
    folder: Path, shape: str, shard_bytes: int | None = None, dtype: str = "float32", **config: object
) -> Path:
    """Save a target of Hugging Face's type ``shape``, in files of about ``shard_bytes``; return its folder."""
    import torch
    import transformers

    base = {} if shape == "gpt2" else _COMMON
    built = transformers.AutoConfig.for_model(shape, **{**base, **_SHAPES.get(shape, {}), **config})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(built)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which start as exactly 1 or 0
                parameter += 0.1 * torch.randn_like(parameter)
    options = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder
