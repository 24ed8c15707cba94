"""Which targets give hidden states, read in a folder of sources such as vLLM's."""

from pathlib import Path

import pytest

from spec_engine_vllm.target_classes import gives_states

SOURCES = {
    "registry.py": """
        _TEXT = {
            "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
            "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
            "Phi3ForCausalLM": ("phi3", "Phi3ForCausalLM"),
            "GemmaForCausalLM": ("gemma", "GemmaForCausalLM"),
            "PlainForCausalLM": ("mistral", "Plain"),
            "NewForCausalLM": ("folder.new", "NewForCausalLM"),
        }
        _MULTIMODAL = {**_TEXT, "LlavaForConditionalGeneration": ("llava", "Llava")}
    """,
    "llama.py": """
        from .interfaces import SupportsEagle3, SupportsPP
        class LlamaForCausalLM(nn.Module, SupportsPP, SupportsEagle3): pass
    """,
    "mistral.py": """
        from vllm.model_executor.models.llama import LlamaForCausalLM as Base
        class Plain(nn.Module): pass
        class MistralForCausalLM(Base): pass
    """,
    "phi3.py": """
        from .mistral import MistralForCausalLM
        class Phi3ForCausalLM(MistralForCausalLM): pass
    """,
    "gemma.py": """
        from .interfaces import SupportsPP
        from ..layers import Gemma
        class GemmaForCausalLM(nn.Module, Gemma, SupportsPP): pass
    """,
    "llava.py": """
        from .interfaces import SupportsEagle3
        class Llava(SupportsEagle3): pass
    """,
    "interfaces.py": """
        class SupportsPP(Protocol): pass
        class SupportsEagle3(Protocol): pass
    """,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, text in SOURCES.items():
        (folder / name).write_text("\n".join(line[8:] for line in text.splitlines()))
    return folder


@pytest.mark.parametrize(
    ("architecture", "gives"),
    [
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", True),
        ("Phi3ForCausalLM", True),
        ("LlavaForConditionalGeneration", True),
        ("GemmaForCausalLM", False),
        ("PlainForCausalLM", False),
    ],
)
def test_a_class_gives_states_if_it_or_a_base_has_the_interface(models, architecture, gives) -> None:
    assert gives_states(architecture, models) == gives


def test_what_the_source_does_not_say_counts_as_true(models, tmp_path) -> None:
    assert gives_states("NewForCausalLM", models)
    assert gives_states("UnknownForCausalLM", models)
    assert gives_states("LlamaForCausalLM", tmp_path)
