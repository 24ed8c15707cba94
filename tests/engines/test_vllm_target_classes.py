"""Which targets give hidden states, as vLLM itself says; a target that does not is refused before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spec_engine_vllm.target_classes import gives_states
from spec_trainer.cli.app import run

from .vllm_here import needs_vllm

pytestmark = needs_vllm
KNOWN = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "AXK1": "AXK1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
}
"""Module of vLLM's models -> a class in it that is registered by this name."""


_ASKS = """
import json, sys
from importlib import import_module
from vllm.model_executor.models.interfaces import supports_eagle3

classes = {name: getattr(import_module(f"vllm.model_executor.models.{module}"), name) for module, name in
           json.loads(sys.argv[1]).items()}
print(json.dumps({name: bool(supports_eagle3(found)) for name, found in classes.items()}))
"""


def test_the_source_says_what_vllm_says() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", _ASKS, json.dumps(KNOWN)], capture_output=True, text=True, check=True
    )
    says = json.loads(asked.stdout.splitlines()[-1])
    assert {name: gives_states(name) for name in KNOWN.values()} == says
    assert set(says.values()) == {True, False}


@pytest.fixture(scope="module")
def gemma(make_target) -> Path:
    return make_target("gemma3_text")


def words(gemma: Path, data: Path, output: Path) -> list[str]:
    flags = ["--target", gemma, "--data", data, "--output", output, "train.steps=1", "data.eval_samples=0"]
    return [*map(str, flags), "draft.num_steps=2"]


def test_a_target_without_states_is_refused_before_anything_starts(
    gemma, random_rows, tmp_path, capsys
) -> None:
    assert run([*words(gemma, random_rows, tmp_path / "run"), "engine.name=vllm"]) == 2
    refusal = capsys.readouterr().err
    assert "vLLM's class Gemma3ForCausalLM gives no hidden states; set engine.name=hf" in refusal
    assert refusal.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_no_vllm_command_is_printed_for_its_draft(gemma, random_rows, tmp_path, capsys) -> None:
    assert run(words(gemma, random_rows, tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "vllm serve" not in printed
    assert "sglang.launch_server" in printed
