"""A server of SGLang that captures states, with a runner whose passes a test plays."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_engine_sglang.serving_capture import (
    STATES,
    answer_states,
    attach_tap,
    begin_capture,
    begin_request,
    states_request_id,
)
from spec_kit.live_traffic import STATES_ARGUMENT
from spec_kit.live_traffic.served_states import StatesRange

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
