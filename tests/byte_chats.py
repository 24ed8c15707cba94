"""A target that speaks bytes and has a chat template, and conversations for it to answer."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .chat_templates import byte_tokenizer

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>")
_END = "<|im_end|>"


def byte_chat_target(make_target: Callable[..., Path], **shape: Any) -> Path:
    """A tiny Llama that ends its turns about once in 30 tokens."""
    ends = [256 + _SPECIALS.index(_END), *range(250, 256)]
    shape = {"initializer_range": 0.1, **shape, "vocab_size": 256 + len(_SPECIALS), "eos_token_id": ends}
    folder = make_target("llama", **shape)
    byte_tokenizer(_SPECIALS, _CHATML, _END).save_pretrained(folder)
    return folder


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Conversations of one to three turns, some with a system prompt, and a row of text and one of tokens."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        turns = [{"role": "system", "content": "be brief"}] if number % 3 == 0 else []
        for turn in range(draw.randint(1, 3)):
            turns += [
                {"role": "user", "content": f"{number} {turn}?"},
                {"role": "assistant", "content": "old"},
            ]
        rows.append({"id": f"c{number}", "messages": turns[: -1 if number % 4 == 0 else None]})
    rows[5] = {"text": "once upon"}
    rows[9] = {"input_ids": [70, 71, 72, 73], "loss_mask": [0, 0, 1, 1]}
    return rows
