"""When a server of SGLang captures states, and what is said where it does not."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.engine_sglang.played_server import Decoder, Request, Runner, expected, key_of

from spec_engine_sglang.hook import register
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pp_size": 2}, "captures no states with --pp-size"),
        ({"enable_dp_attention": True}, "captures no states with --enable-dp-attention"),
        ({"enable_torch_compile": True}, "captures no states with --enable-torch-compile"),
    ],
)
def test_a_server_that_cannot_capture_serves_and_says_why(start, arguments, words) -> None:
    server = start(**arguments)
    Request("a", key_of(1))
    assert server.run({"a": (0, [5, 6])}) is server.runner.result
    assert words in server.ask("")["refused"]


@pytest.fixture
def choices(monkeypatch) -> dict[str, Any]:
    """Return the values that SGLang has chosen; 0.5.23 keeps them apart from the arguments of users."""
    choices: dict[str, Any] = {}
    base = SimpleNamespace(resolved_view=lambda given: SimpleNamespace(**{**vars(given), **choices}))
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", ModuleType("sglang.srt.arg_groups"))
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.model_override_base", base)
    return choices


def test_a_tree_that_the_server_has_chosen_itself_is_refused(start, choices) -> None:
    choices["speculative_eagle_topk"] = 4
    assert "verifies trees of guesses" in start(speculative_eagle_topk=None).ask("")["refused"]


def test_graphs_that_the_server_has_chosen_itself_are_captured(start, choices) -> None:
    phase = SimpleNamespace(backend="full", bs=[1, 2], max_bs=2)
    choices["cuda_graph_config"] = SimpleNamespace(decode=phase, prefill=phase)
    server = start(graphs=True, cuda_graph_config=None)
    server.begin("a", key_of(1))
    server.run({"a": (0, [5, 6, 7])})
    assert torch.equal(server.states(key_of(1), 3)[1], expected([5, 6, 7]))


def test_a_server_without_a_draft_of_several_layers_says_so(start, monkeypatch) -> None:
    monkeypatch.setattr(Decoder, "drafted", ())
    assert "no draft that reads states of several layers" in start().ask("")["refused"]


@pytest.mark.parametrize("variable", ["", '{"share": 1.0}', '{"share": 7}'])
def test_without_states_bytes_nothing_is_captured(start, monkeypatch, variable) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, variable)
    server = start()
    assert "start it with states_bytes" in server.ask("")["refused"]
    assert server.runner.forward.__func__ is Runner.forward


@pytest.mark.parametrize(
    ("variable", "captures"),
    [
        ('{"share": 1.0, "states_bytes": 4096}', True),
        ('{"share": 1.0, "states_bytes": 0}', False),
        ('{"share": 1.0, "labels": ["states_bytes"]}', False),
        ('{"states_bytes": 4096}', False),
    ],
)
def test_only_a_server_that_captures_registers_the_hooks(monkeypatch, variable, captures) -> None:
    names: list[str] = []
    registry = SimpleNamespace(register=lambda name, *_: names.append(name))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AFTER=1, AROUND=2))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, "secret")
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, variable)
    register()
    assert any(name.endswith("ModelRunner.load_model") for name in names) == captures
