"""Tiny random targets that see: model, tokenizer with a chat template, image processor, and their own states."""

import json
from pathlib import Path
from typing import Any

from .chat_templates import byte_tokenizer

EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", *EXPERTS)
"""Qwen's targets, whose images take squares of patches and positions of three coordinates."""
GEMMA = "gemma4"
TWO_WAY = "gemma4_two_way"
"""Gemma 4 as its larger models are: the tokens of an image attend to each other in layers with a window."""
ALL_SEEING = (*SEEING, GEMMA, TWO_WAY)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"

PATCH, MERGE = 4, 2

IMAGE_ID = 256 + len(SPECIALS)
VOCABULARY = IMAGE_ID + 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_VIDEO = "<|video|>"
GEMMA_TEMPLATE = TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
"""The processor, not the template, puts tokens around an image."""

_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    # SGLang takes three levels, as published models have.
    "qwen3_vl_moe": {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 16},
    "qwen3_5": {"num_position_embeddings": 16, "deepstack_visual_indexes": []},
    "qwen3_5_moe": {"num_position_embeddings": 16, "deepstack_visual_indexes": []},
}
_ROTATED = {"qwen3_5": 0.5, "qwen3_5_moe": 0.5}
"""Share of a head's channels that positions rotate; 1 for others."""

_ATTENTION: dict[str, Any] = {"layer_types": ["full_attention"] * 8, "full_attention_interval": 1}
"""Qwen3.5 without recurrent layers, so that engine ``hf`` drafts for it."""
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_5": _ATTENTION,
    "qwen3_vl_moe": _ROUTED,
    "qwen3_5_moe": {**_ATTENTION, **_ROUTED, "shared_expert_intermediate_size": 24},
}

_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def save_seeing_target(
    folder: Path,
    model_type: str,
    hidden_size: int = 32,
    head_dim: int = 8,
    vision_size: int = 16,
    patch: int = PATCH,
) -> Path:
    """Save a target of eight layers and 263 tokens, and return its folder.

    An image has at most 25 tokens, which are squares of 2 x 2 patches of ``patch`` x ``patch`` pixels.
    """
    if model_type in (GEMMA, TWO_WAY):
        return _save_gemma(folder, hidden_size, head_dim, patch, two_way=model_type == TWO_WAY)
    import transformers

    pairs = int(head_dim * _ROTATED.get(model_type, 1.0)) // 2
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": hidden_size // head_dim,
        "num_key_value_heads": hidden_size // head_dim // 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": _ROTATED.get(model_type, 1.0),
            "mrope_section": [pairs // 2, pairs // 2 - pairs // 4, pairs // 4],
            **({"mrope_interleaved": True} if model_type != "qwen2_5_vl" else {}),
        },
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
        **_TEXT.get(model_type, {}),
    }
    vision = {
        "depth": 2,
        "hidden_size": vision_size,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "patch_size": patch,
        "spatial_merge_size": MERGE,
        **_VISION[model_type],
        **({"window_size": 4 * patch} if model_type == "qwen2_5_vl" else {}),
    }
    config = transformers.AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        video_token_id=IMAGE_ID + 1,
        vision_start_token_id=IMAGE_ID - 2,
        vision_end_token_id=IMAGE_ID - 1,
    )
    _save_model(folder, config)
    fields = json.loads((folder / "config.json").read_text())
    if model_type in _ROTATED:  # published files have it here, too, and SGLang reads it here
        fields["text_config"]["partial_rotary_factor"] = _ROTATED[model_type]
    if model_type == "qwen3_vl_moe":
        _write_as_published(folder, fields["text_config"])
    (folder / "config.json").write_text(json.dumps(fields))
    tokenizer = byte_tokenizer((*SPECIALS, IMAGE, VIDEO), TEMPLATE, "<|im_end|>")
    tokenizer.pad_token = SPECIALS[0]
    tokenizer.save_pretrained(folder)
    edges = {"shortest_edge": 4 * patch**2, "longest_edge": 100 * patch**2}  # they are areas
    fields = {**_PROCESSOR, "patch_size": patch, "size": edges}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


def _write_as_published(folder: Path, text: dict[str, Any]) -> None:
    """Give Qwen3-VL's experts the keys and the layout of published files, which engines read.

    Transformers reads these, too, but writes its own.
    """
    from safetensors.torch import load_file, save_file

    text["num_experts"] = text.pop("num_local_experts")
    text["norm_topk_prob"] = True
    del text["tie_word_embeddings"]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _save_gemma(folder: Path, hidden_size: int, head_dim: int, patch: int, *, two_way: bool) -> Path:
    """Save a Gemma 4 of eight layers, whose last two use keys of others. An image has at most 70 tokens."""
    import transformers

    text = {
        "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 0 if two_way else 8, "hidden_size": hidden_size,
        "intermediate_size": 48, "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 96,
        "num_attention_heads": hidden_size // head_dim,
        "num_key_value_heads": hidden_size // head_dim // 2, "num_kv_shared_layers": 0 if two_way else 2,
        "head_dim": head_dim, "global_head_dim": 2 * head_dim, "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision" if two_way else None, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 258,
    }  # fmt: skip
    vision = {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": patch, "pooling_kernel_size": 2,
        "position_embedding_size": 512, "default_output_length": 70,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        GEMMA,
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE_ID,
        video_token_id=IMAGE_ID + 1,
        boi_token_id=IMAGE_ID - 2,
        eoi_token_id=IMAGE_ID - 1,
        audio_token_id=VOCABULARY + 1,
    )
    _save_model(folder, config)
    tokenizer = byte_tokenizer((*SPECIALS, IMAGE, GEMMA_VIDEO), GEMMA_TEMPLATE, "<|im_end|>")
    tokenizer.pad_token = SPECIALS[0]
    ends = {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"}
    # A processor wants tokens for sound, although there is none.
    heard = {"boa_token": "<|vision_start|>", "eoa_token": "<|vision_end|>", "audio_token": GEMMA_VIDEO}
    tokenizer._set_model_specific_special_tokens({"image_token": IMAGE, **ends, **heard})
    tokenizer.save_pretrained(folder)
    images = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": patch,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }
    sound = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
    parts = {"image_processor": images, "feature_extractor": sound}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma4Processor", **parts}))
    return folder


def _save_model(folder: Path, config: Any) -> None:
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            parameter += (0.1 if parameter.dim() == 1 else 0.05) * torch.randn_like(parameter)
    model.save_pretrained(folder)
