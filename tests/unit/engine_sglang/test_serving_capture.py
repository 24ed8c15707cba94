"""States of requests that SGLang serves, played by a runner with SGLang's names, which also replays graphs."""

import json
import sys
from array import array
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_engine_sglang import serving_capture
from spec_engine_sglang.hook import register
from spec_engine_sglang.serving_capture import (
    STATES,
    answer_states,
    attach_tap,
    begin_capture,
    begin_request,
    states_request_id,
)
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE, STATES_ARGUMENT, StatesRange

LAYERS, HIDDEN, GRAPH_ROWS = (1, 3, 4), 2, 8
"""The draft reads the first two layers; the last one is the final norm's input."""


class Graph(TorchDispatchMode):
    """Records what is computed, and computes it again with the same memory, as a graph on a device does."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        out = args[0] if function is torch.ops.aten.copy_.default else (kwargs or {}).get("out")
        if out is not None:
            self._steps.append((function, args, kwargs or {}))
        return result

    def replay(self) -> None:
        for function, args, kwargs in self._steps:
            function(*args, **kwargs)


class Decoder(torch.nn.Module):
    drafted = LAYERS[:-1]

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS[-1]))
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.norm.forward = lambda hidden, residual: hidden
        self.layers_to_capture = list(self.drafted)


class Runner:
    """Runs the target's passes, small ones by a replayed graph if there are graphs, in memory that it reuses."""

    dtype, device, is_draft_worker = torch.float32, "cpu", False
    returns_states = True

    def __init__(self, target: str, graphs: bool, **arguments: Any) -> None:
        phase = SimpleNamespace(backend="full" if graphs else "disabled", bs=[1, 2], max_bs=2)
        usual = {
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "cuda_graph_config": SimpleNamespace(decode=phase, prefill=phase),
        }
        self.server_args = SimpleNamespace(model_path=target, **(usual | arguments))
        self.model_config = SimpleNamespace(hidden_size=HIDDEN)
        self.model = torch.nn.Module()
        self.model.model = Decoder()
        self.result: Any = SimpleNamespace()
        self._halves = torch.zeros(2, GRAPH_ROWS, HIDDEN)
        self._drafted = torch.zeros(64, 2 * HIDDEN)
        self._graph: Graph | None = None

    def record(self, calls_norm: bool = True) -> None:
        self._graph = Graph()
        with self._graph:
            if calls_norm:
                self.model.model.norm(*self._halves)

    def forward(self, batch: Any) -> Any:
        rows = len(batch.input_ids)
        drafted = [state_of(batch.positions, batch.input_ids, layer) for layer in LAYERS[:-1]]
        self._drafted[:rows] = torch.cat(drafted, 1)
        last = state_of(batch.positions, batch.input_ids, LAYERS[-1])
        if self._graph is not None and rows <= GRAPH_ROWS:
            self._halves[:, :rows] = last / 2
            self._graph.replay()
        else:
            self.model.model.norm(last / 2, last / 2)
        states = self._drafted[:rows] if self.returns_states else None
        self.result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states))
        return self.result


class Request:
    def __init__(self, rid: str, key: str | None, **custom: Any) -> None:
        params = custom if key is None else {STATES_ARGUMENT: key}
        self.rid, self.is_over = rid, False
        self.sampling_params = SimpleNamespace(custom_params=params or None)
        begin_request(None, self)

    def finished(self) -> bool:
        return self.is_over


class Server:
    """A scheduler's process: its hooks are called as SGLang calls them."""

    def __init__(self, target: str, graphs: bool = False, calls_norm: bool = True, **arguments: Any) -> None:
        self.runner = Runner(target, graphs, **arguments)
        self.requests: list[Request] = []
        attach_tap(None, self.runner)
        if graphs:
            self.runner.record(calls_norm)
        begin_capture(None, SimpleNamespace(tp_worker=SimpleNamespace(model_runner=self.runner)))

    def begin(self, rid: str, key: str | None) -> Request:
        """Begin a request, which SGLang holds until it ends."""
        self.requests.append(Request(rid, key))
        return self.requests[-1]

    def run(self, rows: dict[str, tuple[int, list[int]]], verifies: bool = False, **spec: Any) -> Any:
        """Run a pass: request -> position of its first token, and the tokens."""
        parts = list(rows.values())
        mode = SimpleNamespace(is_target_verify=lambda: verifies, is_extend=lambda: True)
        positions = [first + place for first, ids in parts for place in range(len(ids))]
        batch = SimpleNamespace(
            rids=list(rows),
            forward_mode=mode,
            positions=torch.tensor(positions),
            input_ids=torch.tensor([token for _, ids in parts for token in ids]),
            extend_seq_lens_cpu=None if verifies else [len(ids) for _, ids in parts],
            spec_info=SimpleNamespace(**spec),
        )
        return self.runner.forward(batch)

    def ask(self, asked: str) -> dict[str, Any]:
        request = SimpleNamespace(rid=states_request_id(asked))
        return answer_states(pytest.fail, None, request).internal_state[STATES]

    def states(self, key: str, rows: int) -> tuple[list[int], torch.Tensor] | str:
        answer = self.ask(StatesRange(key=key, first=0, rows=rows).model_dump_json())
        if "piece" not in answer:
            return answer["left_out"]
        found = torch.frombuffer(bytearray(answer["piece"][4 * rows :]), dtype=torch.float32)
        return array("i", answer["piece"][: 4 * rows]).tolist(), found.view(rows, len(LAYERS), HIDDEN)


def key_of(number: int) -> str:
    return f"{number:016x}"


def state_of(positions: torch.Tensor, token_ids: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.stack([positions * 100.0 + layer, token_ids * 1.0], 1)


def expected(token_ids: list[int]) -> torch.Tensor:
    positions, ids = torch.arange(len(token_ids)), torch.tensor(token_ids)
    return torch.stack([state_of(positions, ids, layer) for layer in LAYERS], 1)


@pytest.fixture
def start(monkeypatch, make_target) -> Callable[..., Server]:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, json.dumps({"share": 1.0, "states_bytes": 1 << 20}))
    monkeypatch.setattr(serving_capture, "_process", serving_capture._Process())
    message = SimpleNamespace(GetInternalStateReqOutput=SimpleNamespace)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", message)
    return lambda **arguments: Server(str(make_target("llama")), **arguments)


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_are_those_of_the_tokens_that_were_accepted(start, graphs) -> None:
    """A prompt comes in chunks beside one that nobody captures, and guesses are rejected."""
    server = start(graphs=graphs)
    one = server.begin("a", key_of(1))
    server.begin("b", None)
    prompt = list(range(3, 15))
    server.run({"a": (0, prompt[:10])})
    server.run({"b": (0, [9, 9, 9]), "a": (10, prompt[10:])})
    server.run({"b": (3, [1, 2, 3, 4]), "a": (12, [20, 21, 99, 98])}, verifies=True)
    server.run({"a": (14, [22, 97, 96, 95])}, verifies=True)
    server.run({"a": (15, [23, 94, 93, 92])}, verifies=True)
    one.is_over = True
    text = [*prompt, 20, 21, 22, 23]
    found = server.states(key_of(1), len(text))
    assert not isinstance(found, str)
    assert found[0] == text
    assert torch.equal(found[1], expected(text))
    assert server.ask("") == {"layers": list(LAYERS), "hidden_size": HIDDEN, "dtype": "float32"}


def test_rows_that_a_graph_does_not_write_are_not_finite(start) -> None:
    """The trainer leaves such rows out. SGLang may replace the norm in its graphs."""
    server = start(graphs=True, calls_norm=False)
    server.begin("a", key_of(1))
    server.run({"a": (0, [5, 6, 7])})
    found = server.states(key_of(1), 3)
    assert not isinstance(found, str)
    assert found[1][:, -1].isnan().all()
    assert torch.equal(found[1][:, :-1], expected([5, 6, 7])[:, :-1])


def test_cached_tokens_and_retractions_are_left_out_unless_their_rows_are_there(start) -> None:
    server = start()
    for number, name in enumerate("abc"):
        server.begin(name, key_of(number))
    server.run({"a": (4, [5, 6]), "b": (0, [5, 6]), "c": (0, [5, 6, 7])})
    server.run({"b": (3, [8])})  # more is cached than it has computed
    server.run({"c": (2, [7, 8])})  # it was retracted; two tokens are still cached
    assert [server.states(key_of(number), 4) for number in (0, 1)] == ["prefix_hit", "hole"]
    found = server.states(key_of(2), 4)
    assert not isinstance(found, str)
    assert found[0] == [5, 6, 7, 8]


def test_a_later_request_of_the_same_id_has_its_own_states(start) -> None:
    """Clients choose ids. The first request was aborted, and SGLang has dropped it without an end."""
    server = start()
    Request("a", key_of(1))
    server.begin("a", key_of(2))
    server.run({"a": (0, [5, 6])})
    assert server.states(key_of(1), 2) == "hole"
    assert server.states(key_of(2), 2)[0] == [5, 6]


def test_a_request_whose_id_is_used_again_while_it_exists_frees_its_memory(start) -> None:
    server = start()
    rows = serving_capture._process.capture._copies.rows
    num_free = rows.num_free
    server.begin("a", key_of(1))
    server.run({"a": (0, [5, 6])})
    server.begin("a", key_of(2))
    server.run({"a": (0, [7, 8])})
    assert rows.has_ended(key_of(1))
    assert [server.states(key_of(number), 2)[0] for number in (1, 2)] == [[5, 6], [7, 8]]
    assert rows.num_free == num_free


def test_a_mark_is_removed_and_other_parameters_are_not(start) -> None:
    start()
    assert Request("a", key_of(1)).sampling_params.custom_params is None
    assert Request("b", None, mine=1).sampling_params.custom_params == {"mine": 1}


@pytest.mark.parametrize("params", ["abc", [1]])
def test_parameters_that_are_no_dictionary_do_not_end_the_server(start, params) -> None:
    """SGLang does not check what a client sends, and an error in the hook would end the scheduler."""
    start()
    request = SimpleNamespace(rid="a", sampling_params=SimpleNamespace(custom_params=params))
    begin_request(None, request)
    assert request.sampling_params.custom_params == params


def test_a_device_without_memory_leaves_out_the_requests_and_never_touches_the_pass(
    start, monkeypatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    server = start()
    server.begin("a", key_of(1))
    monkeypatch.setattr(torch, "empty_like", fail)
    monkeypatch.setattr(torch.Tensor, "new_empty", fail)
    assert server.run({"a": (0, [5, 6, 7])}) is server.runner.result
    assert server.states(key_of(1), 3) == "error"


def test_the_same_error_in_every_pass_is_logged_once_with_its_trace(start, caplog) -> None:
    server = start()
    server.runner.returns_states = False
    for number in range(3):
        request = server.begin("a", key_of(number))
        server.run({"a": (0, [5, 6, 7])})
        request.is_over = True
    assert caplog.text.count("Traceback") == 1
    assert [server.states(key_of(number), 3) for number in range(3)] == ["error"] * 3


def test_an_error_leaves_out_the_requests_and_never_touches_the_pass(start, caplog) -> None:
    server = start()
    server.begin("a", key_of(1))
    result = server.run({"a": (0, [5, 6, 7])}, verifies=True, ragged_verify_layout=object())
    assert result is server.runner.result
    server.begin("b", key_of(2))
    server.runner.returns_states = False
    assert server.run({"b": (0, [5, 6, 7])}) is server.runner.result
    assert [server.states(key_of(number), 3) for number in (1, 2)] == ["error", "error"]
    assert "different numbers of guesses" in caplog.text
    assert "returned states of shape None" in caplog.text


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
