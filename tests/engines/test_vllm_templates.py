"""The requests with which ``tests/templates`` compares samples are those that vLLM renders for all its templates."""

import os
from pathlib import Path

import pytest
import transformers

from ..chat_templates import byte_tokenizer
from ..templates.conversations import MARK, conversation, tools
from ..templates.samples import special_tokens
from ..templates.server import SPECIAL_TOKENS, Server
from ..templates.survey import templates_in
from .vllm_here import needs_vllm, tokenized

TEMPLATES = os.environ.get("SPEC_TEST_TEMPLATES", "")
pytestmark = [
    *needs_vllm,
    pytest.mark.skipif(not TEMPLATES, reason="needs the files that make test-templates fetches"),
    pytest.mark.timeout(1800),
]
MAX_LENGTH = 100_000
SHAPES_ASKED = [
    "system", "several turns", "call, content empty", "text before the call", "agent chain",
    "empty answer",
]  # fmt: skip


def test_the_requests_of_the_survey_are_those_that_vllm_renders(tmp_path) -> None:
    """But for 27 templates that loop over contents and do not write the parts of some role.

    vLLM gives them a list there. The target sees the list itself or no text, or the template refuses the request.
    """
    templates = templates_in(Path(TEMPLATES))
    tokenizer = _target(tmp_path, special_tokens(templates.values()))
    asked = [(name, shape) for name in templates for shape in SHAPES_ASKED]
    requests = [_request(templates[name], shape) for name, shape in asked]
    unequal = set()
    for (name, shape), answer in zip(asked, tokenized(tmp_path, requests, MAX_LENGTH), strict=True):
        server, messages, offered = Server(templates[name]), _messages(shape), tools(_messages(shape))
        text = server.render(messages, offered, prompt=True)
        ids = None if text is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids != answer.get("tokens"):
            unequal.add(name)
            seen = tokenizer.decode(answer.get("tokens", []))
            assert {message["role"] for message in messages} - {"tool"} - server.roles_in_parts(offered)
            assert "{'type': 'text', 'text': " in seen or set(MARK.findall(text)) - set(MARK.findall(seen))
    assert len(unequal) == 27


def _target(folder: Path, specials: set[str]) -> transformers.PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(sorted(specials), "{{ messages }}", SPECIAL_TOKENS["eos_token"])
    for name, token in SPECIAL_TOKENS.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=2)
    config.update({"architectures": ["LlamaForCausalLM"], "vocab_size": len(tokenizer)})
    config.update({"max_position_embeddings": MAX_LENGTH})
    config.save_pretrained(folder)
    return tokenizer


def _messages(shape: str) -> list[dict]:
    """The messages before the last answer."""
    return conversation(shape)[:-1]


def _request(template: str, shape: str) -> dict:
    messages = _messages(shape)
    return {"messages": messages, "tools": tools(messages), "chat_template": template}
