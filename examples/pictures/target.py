"""Train a tiny target that sees: a Qwen3-VL of random weights, until it describes the pictures.

Shapes: B pictures of a batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from drawing import CELL, QUESTION, scenes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoImageProcessor,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH, MERGE = 8, 2
"""Pixels of a patch's side, and how many patches side by side make a token: a token is one cell of a picture."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": CELL**2, "longest_edge": (8 * CELL) ** 2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """Sizes of the target and of its training."""

    hidden_size: int = 64
    num_layers: int = 4
    steps: int = 250
    batch_size: int = 32
    lr: float = 4e-3


def build_target(folder: Path, size: TargetSize) -> float:
    """Train a target and save it to ``folder``; return the share of held-out captions that it gets wholly right.

    Every step has new pictures.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = _new_model(size, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, size.lr, total_steps=size.steps, pct_start=0.1, anneal_strategy="cos"
    )
    for step, (batch, answer_BT) in enumerate(_batches(size, tokenizer, processor), start=1):
        logits_BTV = model(**batch).logits
        loss = F.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), answer_BT[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == size.steps:
            print(f"target: step {step} of {size.steps}, loss {loss.item():.3f} nats per token", flush=True)
    model.eval().save_pretrained(folder)
    return _share_right(model, tokenizer, processor)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which each word of a caption is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [scene.caption for scene in scenes(200, seed=0)]
    tokenizer.train_from_iterator([*texts, *["user", "assistant", QUESTION] * 10], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIALS[1:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _new_model(size: TargetSize, tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    ids = dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids(list(SPECIALS)), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.hidden_size,
        "intermediate_size": 2 * size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // 16,
        "num_key_value_heads": size.hidden_size // 16,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": size.hidden_size**-0.5 / 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": size.hidden_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
        "initializer_range": 0.06,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config)


def _batches(
    size: TargetSize, tokenizer: PreTrainedTokenizerFast, processor: Any
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield the arguments of a forward pass, and int64 [B, T]: each token of an answer, and -100 elsewhere."""
    for step in range(size.steps):
        shown = scenes(size.batch_size, seed=1_000_000 + step)
        batch, prompt = inputs(shown, tokenizer, processor, with_answers=True)
        answer_BT = batch["input_ids"].clone()
        answer_BT[:, :prompt] = -100
        yield batch, answer_BT


def inputs(
    shown: list[Any], tokenizer: PreTrainedTokenizerFast, processor: Any, with_answers: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the arguments of a forward pass over scenes' rows, all of one length, and the length of a prompt."""
    image = "<|image_pad|>" * 4
    prompt = f"<|im_start|>user\n<|vision_start|>{image}<|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = tokenizer(prompt)["input_ids"]
    answers = [f"{scene.caption}<|im_end|>" if with_answers else "" for scene in shown]
    ids_BT = torch.tensor([[*prompt_ids, *tokenizer(answer)["input_ids"]] for answer in answers])
    kind_BT = (ids_BT == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    arrays = processor([scene.drawn() for scene in shown], return_tensors="pt")
    return {"input_ids": ids_BT, "mm_token_type_ids": kind_BT, **arrays}, len(prompt_ids)


def _share_right(model: Any, tokenizer: PreTrainedTokenizerFast, processor: Any) -> float:
    shown = scenes(100, seed=3)
    batch, prompt = inputs(shown, tokenizer, processor, with_answers=True)
    with torch.no_grad():
        best_BT = model(**batch).logits[:, prompt - 1 : -1].argmax(dim=-1)
    return float((best_BT == batch["input_ids"][:, prompt:]).all(dim=1).float().mean())
