"""Fresh weights reach the draft of a vLLM that a user has started as a server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_core.errors import EngineError
from spec_kit.hosting import HttpReplica
from spec_kit.targets import read_target
from spec_kit.weight_sync import Publisher

from ..user_server import Server
from ..vllm_here import needs_vllm
from .conftest import LIMIT_S, PROMPTS, weights_of

pytestmark = [*needs_vllm, pytest.mark.xdist_group("updates")]


@pytest.fixture
def server(vllm_environment, llama, trained, worse, tmp_path, vllm_context) -> Iterator[Server]:
    server = Server(llama, worse, trained.folder, tmp_path)
    try:
        server.wait_ready(vllm_context.start_s)
        yield server
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["eagle3"], indirect=True)
def test_a_server_that_a_user_has_started_takes_fresh_weights(
    llama, server, trained, worse, transports, notes
) -> None:
    prompts = trained.prompts[PROMPTS]
    texts, headers = server.generate(prompts)
    assert "x-draft-version" not in headers
    status, _, body = server.ask("GET", "/spec/draft/status", token="another")
    assert (status, "bearer token" in body.decode()) == (401, True)
    with pytest.raises(EngineError, match="refused status: a bearer token is needed"):
        HttpReplica(server.url, "another")

    replica = HttpReplica(server.url, server.token)
    before = replica.acceptance()
    assert before.rounds > 0
    tensors = weights_of(trained.folder)
    with Publisher(transports, read_target(llama).digest) as publisher:
        publisher.add("server", replica).result(LIMIT_S)
        report = publisher.publish(1, tensors).result(LIMIT_S)
        refused = publisher.publish(2, {**tensors, "more": torch.zeros(1)}).result(LIMIT_S)
    assert report.committed, report
    assert "has more besides" in refused.replicas["server"].reason
    assert replica.acceptance().rounds == 0
    with ThreadPoolExecutor(1) as asking:
        held = asking.submit(replica.acceptance, rounds=5, wait_s=30.0)
        after, headers = server.generate(prompts)
        assert held.result(LIMIT_S).rounds >= 5
    assert after == texts
    assert headers["x-draft-version"] == "1"
    assert headers["x-draft-digest"] == report.digest
    assert replica.acceptance().acceptance_length > before.acceptance_length
    assert len(notes.target_digests()) == 1

    pushed, served = server.push_as_on_the_page()
    assert pushed.startswith(f"{server.url}  committed  version 2 by ")
    after, headers = server.generate(prompts)
    assert (after, headers["x-draft-version"]) == (texts, "2")
    assert served.startswith(f"{server.url}  version 2  {headers['x-draft-digest']}  committed")
