"""States of requests that SGLang serves, played by a runner with SGLang's names, which also replays graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.engine_sglang.played_server import HIDDEN, LAYERS, Request, expected, key_of

from spec_engine_sglang import serving_capture
from spec_engine_sglang.serving_capture import begin_request


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
