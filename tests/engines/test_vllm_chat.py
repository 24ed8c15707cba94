"""Prompts are the token ids that vLLM's own chat endpoints make of the same conversations."""

import json
from pathlib import Path

import pytest
import transformers

from spec_trainer.configuration.chat import PromptConfig
from spec_trainer.data.prompts import load_prompts

from ..chat_templates import CONVERSATIONS, READS_PARTS, THINKING, thinking_tokenizer
from .vllm_here import needs_vllm, tokenized

pytestmark = needs_vllm

VOCAB = 300
OWN = THINKING.replace("<|im_end|>", "<|im_end|>\n")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "target")
    thinking_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_prompts_are_what_the_chat_endpoint_makes_of_them(target, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    answer = {"role": "assistant", "content": "What comes before the last answer is the prompt."}
    rows = [row | {"messages": [*row["messages"], answer]} for row in CONVERSATIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    formats = [
        {"chat_template_kwargs": {}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}, "chat_template": OWN},
        {"chat_template": READS_PARTS},
    ]
    requests = [row | chat for chat in formats for row in CONVERSATIONS]
    ours = [
        prompt for chat in formats for prompt in load_prompts(file, target, VOCAB, 512, PromptConfig(**chat))
    ]
    assert ours == [answer["tokens"] for answer in tokenized(target, requests)]
    number = len(CONVERSATIONS)
    assert ours[:number] == ours[number : 2 * number] != ours[2 * number : 3 * number] != ours[3 * number :]
