"""States of the second model runner of vLLM, played by a runner with vLLM's names: it needs an accelerator itself."""

import json
import sys
from array import array
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from spec_engine_vllm import serving_capture
from spec_engine_vllm.serving_capture import capture_if_asked, states_of
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE, STATES_ARGUMENT, state_copies
from spec_kit.live_traffic.served_states import StatesRange

LAYERS, HIDDEN = (1, 3, 4), 2
"""The draft reads the first two layers; the last one is the final norm's input."""
PADDING = 3


class State(NamedTuple):
    input_batch: Any
    aux_hidden_states: list[torch.Tensor] | None


class SecondRunner:
    """Runs steps as vLLM's second model runner does: sorted by length, padded, states in buffers that it reuses."""

    use_aux_hidden_state_outputs, device, req_states = True, torch.device("cpu"), None

    def __init__(self) -> None:
        text = SimpleNamespace(num_hidden_layers=LAYERS[-1])
        self.model_config = SimpleNamespace(
            hf_text_config=text, dtype=torch.float32, get_hidden_size=lambda: HIDDEN
        )
        parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, additional_config={})
        self.part = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
        self.speculative_config, self.model = SimpleNamespace(), self
        self.layers: tuple[int, ...] = ()
        self.execute_model_state: State | None = None
        self._buffers = [torch.zeros(64, HIDDEN) for _ in LAYERS]

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def modules(self) -> list[Any]:
        return [self.part]

    def load_model(self) -> None:
        self.set_aux_hidden_state_layers(LAYERS[:-1])

    def execute_model(self, step: Any, dummy_run: bool = False) -> None:
        self.execute_model_state = None
        order = sorted(step.num_scheduled_tokens, key=step.num_scheduled_tokens.__getitem__)
        if not order:
            return
        rows = [(position, token) for one in order for position, token in step.rows[one]]
        rows += [(0, 0)] * PADDING
        positions, token_ids = torch.tensor(rows, dtype=torch.int32).unbind(1)
        for layer, buffer in zip(self.layers, self._buffers, strict=True):
            buffer[: len(rows)] = state_of(positions, token_ids, layer)
        lengths = np.array([step.num_scheduled_tokens[one] for one in order])
        batch = SimpleNamespace(
            req_ids=order, num_scheduled_tokens=lengths, positions=positions, input_ids=token_ids
        )
        states = [buffer[: len(rows)] for buffer in self._buffers]
        self.execute_model_state = State(batch, states)

    def run(
        self, rows: dict[str, tuple[int, list[int]]], new: Any = (), ended: Any = (), preempted: Any = ()
    ):
        """Run a step: request -> position of its first token, and the tokens. ``new``: may be a dict of keys."""
        keys = new if isinstance(new, dict) else {one: key_of(one) for one in new}
        named = {one: list(enumerate(ids, first)) for one, (first, ids) in rows.items()}
        step = SimpleNamespace(
            rows=named,
            num_scheduled_tokens={one: len(part) for one, part in named.items()},
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one, sampling_params=SimpleNamespace(extra_args={STATES_ARGUMENT: key})
                )
                for one, key in keys.items()
            ],
            finished_req_ids=set(ended),
            preempted_req_ids=set(preempted) or None,
        )
        self.execute_model(step)
        state = self.execute_model_state
        self.execute_model_state = None
        return state


def key_of(request_id: str) -> str:
    return f"{ord(request_id):016x}"


def state_of(positions: torch.Tensor, token_ids: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.stack([positions * 100.0 + layer, token_ids * 1.0], 1)


def states(runner: SecondRunner, request_id: str, rows: int) -> tuple[list[int], torch.Tensor] | str:
    answer = states_of(runner, StatesRange(key=key_of(request_id), first=0, rows=rows).model_dump_json())
    assert answer is not None
    if "piece" not in answer:
        return answer["left_out"]
    ids = array("i", answer["piece"][: 4 * rows]).tolist()
    found = torch.frombuffer(bytearray(answer["piece"][4 * rows :]), dtype=torch.float32)
    return ids, found.view(rows, len(LAYERS), HIDDEN)


def expected(token_ids: list[int]) -> torch.Tensor:
    positions, ids = torch.arange(len(token_ids)), torch.tensor(token_ids)
    return torch.stack([state_of(positions, ids, layer) for layer in LAYERS], 1)


@pytest.fixture
def runner(monkeypatch) -> SecondRunner:
    class Runner(SecondRunner):
        """A class that is wrapped by this test alone."""

    parallel = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    eagle3 = SimpleNamespace(get_eagle3_aux_layers_from_config=lambda _: LAYERS[:-1])
    worker = "vllm.v1.worker"
    modules: dict[str, Any] = {
        "vllm.distributed.parallel_state": parallel,
        f"{worker}.gpu_model_runner": SimpleNamespace(GPUModelRunner=type("FirstRunner", (), {})),
        f"{worker}.gpu.model_runner": SimpleNamespace(GPUModelRunner=Runner),
        f"{worker}.gpu.spec_decode.eagle.eagle3_utils": eagle3,
    }
    for name, module in modules.items():
        parts = name.split(".")
        for number in range(1, len(parts)):
            package = ".".join(parts[:number])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, json.dumps({"share": 1.0, "states_bytes": 1 << 16}))
    capture_if_asked()
    runner = Runner()
    runner.load_model()
    return runner


def test_rows_of_a_mixed_batch_go_to_their_requests(runner) -> None:
    assert runner.layers == LAYERS
    runner.run({"a": (0, [11, 12, 13, 14])}, new=["a"])
    state = runner.run({"a": (4, [15, 90]), "b": (0, [21, 22, 23])}, new=["b"])
    assert [len(part) for part in state.aux_hidden_states] == [5 + PADDING] * 2  # the drafter's layers alone
    runner.run({"b": (3, [24]), "a": (5, [16, 17])})  # guess 90 was rejected
    runner.run({}, ended=["a", "b"])
    for request_id, ids in {"a": [11, 12, 13, 14, 15, 16, 17], "b": [21, 22, 23, 24]}.items():
        found = states(runner, request_id, len(ids))
        assert found[0] == ids
        torch.testing.assert_close(found[1], expected(ids))


def test_a_preempted_request_that_comes_back_as_a_new_one_is_complete(runner) -> None:
    runner.run({"a": (0, [11, 12, 13])}, new=["a"])
    runner.run({"b": (0, [21, 22])}, new=["b"], preempted=["a"])
    runner.run({"b": (2, [23]), "a": (2, [13, 14])}, new=["a"])  # two tokens were cached
    runner.run({}, ended=["a", "b"])
    found = states(runner, "a", 4)
    assert found[0] == [11, 12, 13, 14]
    torch.testing.assert_close(found[1], expected([11, 12, 13, 14]))


def test_a_session_with_further_input_is_left_out(runner) -> None:
    runner.run({"a": (0, [11, 12, 13])}, new=["a"])
    runner.run({"a": (3, [14])}, new=["a"])
    runner.run({}, ended=["a"])
    assert states(runner, "a", 4) == "session"


def test_requests_of_one_id_have_their_own_states_while_copies_are_under_way(runner, monkeypatch) -> None:
    device, copied = SimpleNamespace(query=lambda: False, synchronize=lambda: None), state_copies._copied
    monkeypatch.setattr(state_copies, "_copied", lambda *args: replace(copied(*args), ready=device))
    runner.run({"a": (0, [11, 12, 13])}, new={"a": key_of("b")})
    runner.run({"a": (0, [21, 22])}, new={"a": key_of("c")}, ended=["a"])
    runner.run({}, ended=["a"])
    for key, ids in {"b": [11, 12, 13], "c": [21, 22]}.items():
        found = states(runner, key, len(ids))
        assert found[0] == ids
        torch.testing.assert_close(found[1], expected(ids))


def test_an_error_leaves_out_the_requests_of_its_steps_and_is_logged_once(
    runner, monkeypatch, caplog
) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("a build of vLLM with other fields")

    runner.run({"a": (0, [11, 12])}, new=["a"])
    monkeypatch.setattr(serving_capture, "step_batch", fail)
    runner.run({"a": (2, [13]), "b": (0, [21])})
    runner.run({"b": (1, [22]), "c": (0, [31])}, new=["c"])
    assert [states(runner, one, 1) for one in "abc"] == ["error", "states_dropped", "error"]
    assert caplog.text.count("Traceback") == 1


def test_dummy_steps_have_no_rows_and_the_drafter_sees_its_layers(runner) -> None:
    step = SimpleNamespace(num_scheduled_tokens={"dummy": 2}, rows={"dummy": [(0, 0), (1, 0)]})
    runner.execute_model(step, dummy_run=True)
    assert len(runner.execute_model_state.aux_hidden_states) == 2


def test_compiled_code_of_other_layers_has_another_name(runner) -> None:
    for part in (runner, runner.part):
        assert part.vllm_config.additional_config["spec_states_layers"] == list(LAYERS)
