"""The desk (engine) and the outlet (its worker), as two parties of one process and over the real transport."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import lobby
from spec_core.engine import EngineContext
from spec_core.errors import DeadlineExceeded, EngineError, PeerLost, ProtocolError
from spec_core.hosting.capture_desk import CaptureDesk
from spec_core.hosting.capture_outlet import CaptureOutlet
from spec_core.records import CaptureRequest, FeatureSchema
from spec_core.streams.shared_memory_transport import SharedMemoryTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_core import FeatureReceiver

LIMIT_S = 20.0
SITE = EngineContext(backend=CpuBackend(CpuBackend.Config()), placement="colocated", peer_s=2.0)
SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="float32")


@pytest.fixture
def desk() -> Iterator[CaptureDesk]:
    with CaptureDesk(SITE, SCHEMA, send_timeout_s=2.0) as desk:
        yield desk


@pytest.fixture
def outlet(desk: CaptureDesk) -> Iterator[CaptureOutlet]:
    with CaptureOutlet(desk.address, LIMIT_S) as outlet:
        yield outlet


@pytest.fixture
def receiver() -> Iterator[FeatureReceiver]:
    with SharedMemoryTransport().listen(SCHEMA, 1 << 16) as receiver:
        yield receiver


def request(request_id: int, destination: str, num_tokens: int = 3) -> CaptureRequest:
    return CaptureRequest(
        request_id=request_id, input_ids=tuple(range(num_tokens)), destinations=(destination,)
    )


def states(num_tokens: int = 3) -> torch.Tensor:
    return torch.arange(num_tokens * 8, dtype=torch.float32).view(num_tokens, 2, 4)


def test_states_reach_the_destination_of_their_request(desk, outlet, receiver) -> None:
    asked = [request(7, receiver.address), request(8, receiver.address, 2)]
    (one, two), done = desk.expect(asked)
    outlet.deliver(two, [0, 1], states(2))  # an engine finishes requests in any order
    outlet.deliver(one, [0, 1, 2], states(3))
    got = [receiver.receive(LIMIT_S) for _ in asked]
    assert [(s.request_id, s.input_ids.tolist()) for s in got] == [(8, [0, 1]), (7, [0, 1, 2])]
    assert all(torch.equal(s.hidden_TNH, states(len(s.input_ids))) for s in got)
    assert done.result(LIMIT_S) is None


def test_other_tokens_than_asked_for_fail_the_request_alone(desk, outlet, receiver) -> None:
    (bad,), bad_done = desk.expect([request(1, receiver.address)])
    (good,), good_done = desk.expect([request(1, receiver.address)])
    outlet.deliver(bad, [0, 1, 5], states())
    outlet.deliver(good, [0, 1, 2], states())
    with pytest.raises(EngineError, match="sample 1: EngineError: the engine ran other tokens"):
        bad_done.result(LIMIT_S)
    assert good_done.result(LIMIT_S) is None


def test_a_batch_is_done_with_its_last_request_and_fails_of_the_first_reason(desk, outlet, receiver) -> None:
    (one, two, three), done = desk.expect([request(i, receiver.address) for i in (1, 2, 3)])
    desk.fail([two, two], EngineError("too long"))
    outlet.deliver(one, [9], states(1))
    assert not done.done()
    outlet.deliver(three, [0, 1, 2], states())
    with pytest.raises(EngineError, match="too long"):
        done.result(LIMIT_S)
    assert receiver.receive(LIMIT_S).request_id == 3
    desk.drain()


def test_a_hook_that_is_never_called_shows_in_health() -> None:
    with CaptureDesk(SITE, SCHEMA, send_timeout_s=0.2) as desk, CaptureOutlet(desk.address, LIMIT_S):
        assert desk.wait_connected(LIMIT_S)
        desk.expect([request(1, "x")])
        desk.health()
        time.sleep(2 * 0.2 + 0.1)
        with pytest.raises(EngineError, match=r"captured nothing for twice engine.send_timeout_s"):
            desk.health()


def test_a_trainer_that_is_gone_fails_the_request_with_its_cause(desk, outlet, receiver) -> None:
    receiver.close()
    (key,), done = desk.expect([request(1, receiver.address)])
    outlet.deliver(key, [0, 1, 2], states())
    with pytest.raises(EngineError, match="PeerLost"):
        done.result(LIMIT_S)


def test_failures_of_engine_and_hook_reach_the_future(desk, outlet) -> None:
    by_engine, engine_done = desk.expect([request(1, "x")])
    (by_hook,), hook_done = desk.expect([request(2, "x")])
    desk.fail(by_engine, EngineError("too long"))
    outlet.fail(by_hook, RuntimeError("no memory\nat all"))
    with pytest.raises(EngineError, match="too long"):
        engine_done.result(LIMIT_S)
    with pytest.raises(EngineError, match="sample 2: RuntimeError: no memory"):
        hook_done.result(LIMIT_S)


def test_no_worker_no_requests(desk) -> None:
    with pytest.raises(EngineError, match="has not connected"):
        desk.expect([request(1, "x")])


def test_only_the_holder_of_the_token_is_welcome(desk, receiver) -> None:
    name = desk.address.partition(":")[0]
    with pytest.raises(ProtocolError, match="refused"):
        CaptureOutlet(f"{name}:forged", LIMIT_S)
    with CaptureOutlet(desk.address, LIMIT_S) as outlet:
        (key,), done = desk.expect([request(1, receiver.address)])
        outlet.deliver(key, [0, 1, 2], states())
        done.result(LIMIT_S)


def framed(payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + payload


@pytest.mark.parametrize(
    "said",
    [
        b"",
        framed(b"{]"),
        framed(b"null"),
        framed(b"[" * 4096),
        framed('{"token": "\u00e4"}'.encode()),
        framed(b'{"token": "\\ud800"}'),
        struct.pack("!I", (1 << 32) - 1) + bytes(4096),
    ],
    ids=["nothing", "no JSON", "no record", "too deep", "no ASCII", "surrogate", "4 GiB"],
)
def test_a_stranger_that_came_first_keeps_nobody_out(desk, monkeypatch, said) -> None:
    monkeypatch.setattr("spec_core.lobby.HELLO_S", 0.2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + desk.address.partition(":")[0])
        stranger.sendall(said)
        with CaptureOutlet(desk.address, LIMIT_S):
            assert desk.wait_connected(LIMIT_S)


def test_a_stranger_that_says_nothing_delays_nobody(desk) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + desk.address.partition(":")[0])
        started = time.monotonic()
        with CaptureOutlet(desk.address, LIMIT_S):
            assert time.monotonic() - started < lobby.HELLO_S / 2


def test_a_closed_desk_ends_what_is_pending(desk, outlet) -> None:
    _, done = desk.expect([request(1, "x")])
    desk.close()
    desk.close()
    with pytest.raises(EngineError, match="closed"):
        done.result(LIMIT_S)
    with pytest.raises(EngineError, match="closed"):
        desk.health()
    with pytest.raises(PeerLost):
        CaptureOutlet(desk.address, LIMIT_S)


_WORKER = """\
import sys, time
from spec_core.hosting.capture_outlet import CaptureOutlet
outlet = CaptureOutlet(sys.argv[1], 20.0)
print("connected", flush=True)
time.sleep(60)
"""


@pytest.fixture
def worker(desk) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-W", "error", "-c", _WORKER, desk.address]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        yield process
        process.kill()


def test_a_worker_that_dies_fails_what_is_pending(desk, worker) -> None:
    _, done = desk.expect([request(1, "x")])
    worker.kill()
    with pytest.raises(EngineError, match="worker process has ended"):
        done.result(LIMIT_S)
    with pytest.raises(EngineError, match="worker process has ended"):
        desk.health()


def test_a_stopped_worker_shows_in_health(desk, worker) -> None:
    desk.health()
    worker.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not is_ill(desk):
        time.sleep(0.1)
    with pytest.raises(EngineError, match=r"silent for timeouts.peer_s=2.0"):
        desk.health()


def is_ill(desk: CaptureDesk) -> bool:
    try:
        desk.health()
    except EngineError:
        return True
    return False


def test_an_unannounced_request_is_reported(desk, outlet, receiver) -> None:
    """Nothing waits for ever for an order that never comes."""
    with pytest.raises(DeadlineExceeded, match="never announced"):
        outlet._order(99)
