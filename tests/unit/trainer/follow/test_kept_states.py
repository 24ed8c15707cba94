"""States of a live request become a sample only if each row belongs to the request's own token."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from spec_core.records import FeatureSchema
from spec_kit.hosting import HttpReplica, LiveRequest
from spec_trainer.follow.kept_states import take_states

from ...kit.hosting.test_replicas import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="bfloat16")
KEY = "ab" * 8
STATES = torch.arange(32, dtype=torch.bfloat16).view(4, 2, 4)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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
        ids = torch.tensor([5, 6, 7, 8], dtype=torch.int32).numpy().tobytes()
        server.answer = (200, ids + STATES.view(torch.uint8).numpy().tobytes())
        taken = take_states(replica, LiveRequest(prompt=prompt, answer=answer, states=key), SCHEMA)
    assert torch.equal(taken, found) if isinstance(found, torch.Tensor) else taken == found
