"""States of a live request become a sample only if each row belongs to the request's own token."""

from collections.abc import Iterator

import pytest
import torch

from spec_core.errors import EngineError
from spec_core.records import FeatureSchema
from spec_kit.hosting import HttpReplica
from spec_kit.live_traffic.live_requests import LiveRequest
from spec_trainer.live import traffic
from spec_trainer.live.kept_states import take_states
from spec_trainer.live.traffic import Traffic, with_states

from ...kit.hosting.update_server import ANSWER, Server, running_server

SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="bfloat16")
KEY = "ab" * 8
STATES = torch.arange(32, dtype=torch.bfloat16).view(4, 2, 4)
PIECE = (
    torch.tensor([5, 6, 7, 8], dtype=torch.int32).numpy().tobytes()
    + STATES.view(torch.uint8).numpy().tobytes()
)


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.mark.parametrize(
    ("prompt", "answer", "key", "found"),
    [
        ([5, 6], [7, 8, 9], KEY, STATES),
        ([5, 6], [7, 9, 9], KEY, "other_tokens"),
        ([6, 5], [7, 8, 9], KEY, "other_tokens"),
        ([5, 6, 7, 8], [9], KEY, "one_token"),
        ([5, 6], [7, 8, 9], None, "no_states"),
    ],
)
def test_states_are_taken_or_left_out_by_a_cause(server, prompt, answer, key, found) -> None:
    with HttpReplica(f"http://127.0.0.1:{server.server_port}", "secret") as replica:
        server.answer = (200, PIECE)
        taken = take_states(replica, LiveRequest(prompt=prompt, answer=answer, states=key), SCHEMA)
    assert torch.equal(taken, found) if isinstance(found, torch.Tensor) else taken == found


def test_requests_of_a_server_that_fails_are_left_out_by_name(server) -> None:
    answers = [[7, 8, 9], [7, 8, 9, 10], [7, 8, 9]]  # the second one has a row more than the server sends
    requests = [LiveRequest(prompt=[5, 6], answer=answer, states=KEY) for answer in answers]
    taken = []
    with HttpReplica(f"http://127.0.0.1:{server.server_port}", "secret") as replica:
        server.answer = (200, PIECE)
        with pytest.raises(EngineError, match="that are none"):
            taken.extend(with_states(replica, requests, SCHEMA))
    assert [request for request, _ in taken] == requests
    assert torch.equal(taken[0].states, STATES)
    assert [states for _, states in taken[1:]] == ["server_failed"] * 2


@pytest.mark.timeout(30)
def test_a_fetch_ends_while_the_server_stores_more_than_is_fetched(server, monkeypatch) -> None:
    """Each answer says that requests are left: this server stores faster than it is asked."""
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "secret")
    monkeypatch.setattr(traffic, "_LONGEST_TAKE_S", 0.2)
    request = LiveRequest(prompt=[5, 6], answer=[7, 8, 9], states=None)
    server.pieces = iter([(200, ANSWER)])
    server.answer = (
        200,
        {"requests": [request.model_dump(mode="json")], "left": 1, "stored": 9, "left_out": {"empty": 2}},
    )
    found = Traffic([f"http://127.0.0.1:{server.server_port}"], 10.0)
    taken = found.take()
    assert len(taken) == len(server.asked) - 1 > 1
    assert all(one.request == request for one in taken)
    assert found.left_out == {"empty": 2}
