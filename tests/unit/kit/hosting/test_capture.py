"""CaptureController (engine) and FeatureExporter (its worker), as two parties of one process."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext, FeatureReceiver
from spec_core.errors import EngineError, PeerLost, ProtocolError
from spec_core.records import CaptureRequest, FeatureSchema
from spec_kit.hosting import FeatureExporter
from spec_kit.hosting.capture_controller import CaptureController
from spec_kit.layers.fp8_features import decode_features
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_processes.sockets import peer_admission

LIMIT_S = 20.0
CONTEXT = EngineContext(backend=CpuBackend(CpuBackend.Config()), placement="colocated", peer_s=2.0)
SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="float32")


@pytest.fixture
def controller() -> Iterator[CaptureController]:
    with CaptureController(CONTEXT, SCHEMA, send_timeout_s=2.0) as controller:
        yield controller


@pytest.fixture
def exporter(controller: CaptureController) -> Iterator[FeatureExporter]:
    with FeatureExporter(controller.address, LIMIT_S) as exporter:
        assert controller.wait_connected(LIMIT_S)
        yield exporter


@pytest.fixture
def receiver() -> Iterator[FeatureReceiver]:
    with SharedMemoryTransport().listen(SCHEMA, 1 << 16) as receiver:
        yield receiver


def request(request_id: int, *destinations: str, num_tokens: int = 3) -> CaptureRequest:
    return CaptureRequest(
        request_id=request_id, input_ids=tuple(range(num_tokens)), destinations=destinations
    )


def registered(
    controller: CaptureController, *requests: CaptureRequest
) -> tuple[list[tuple[str, ...]], Future[None]]:
    """The destinations as the exporter knows them, and the future of all requests."""
    done: Future[None] = Future()
    return [known.destinations for known in controller.register(requests, done)], done


def states(num_tokens: int = 3) -> torch.Tensor:
    return torch.arange(num_tokens * 8, dtype=torch.float32).view(num_tokens, 2, 4)


def test_states_reach_the_destination_of_their_request(controller, exporter, receiver) -> None:
    with SharedMemoryTransport().listen(SCHEMA, 1 << 16) as other:
        asked = [request(7, receiver.address), request(8, receiver.address, num_tokens=2)]
        asked.append(request(9, other.address, receiver.address))
        (first, same, second), done = registered(controller, *asked)
        assert first == same == second[1:]
        assert not {*first, *second} & {
            receiver.address,
            other.address,
        }  # they hold tokens; engines write logs
        exporter.export(9, second, [0, 1, 2], states(3))  # an engine finishes requests in any order
        exporter.export(8, same, [0, 1], states(2))
        exporter.export(7, first, torch.arange(3), states(3))
        assert other.receive(LIMIT_S).request_id == 9
        got = [receiver.receive(LIMIT_S) for _ in range(3)]
    assert [(s.request_id, s.input_ids.tolist()) for s in got] == [
        (9, [0, 1, 2]),
        (8, [0, 1]),
        (7, [0, 1, 2]),
    ]
    assert all(torch.equal(s.hidden_TNH, states(len(s.input_ids))) for s in got)
    assert done.result(LIMIT_S) is None


def test_states_are_sent_as_the_schema_says() -> None:
    schema = replace(SCHEMA, sent_dtype="fp8_e4m3")
    with (
        SharedMemoryTransport().listen(schema.sent, 1 << 16) as receiver,
        CaptureController(CONTEXT, schema, send_timeout_s=2.0) as controller,
        FeatureExporter(controller.address, LIMIT_S) as exporter,
    ):
        assert controller.wait_connected(LIMIT_S)
        (name,), done = registered(controller, request(1, receiver.address))
        exporter.export(1, name, [0, 1, 2], states())
        decoded = torch.zeros(3, 2, 4)
        decode_features(receiver.receive(LIMIT_S).hidden_TNH, decoded)
        assert done.result(LIMIT_S) is None
    torch.testing.assert_close(decoded, states(), rtol=2.0**-4, atol=0)
    assert not torch.equal(decoded, states())


def test_trainer_gets_the_tokens_that_were_run(controller, exporter, receiver) -> None:
    """It compares them with its data."""
    (name,), done = registered(controller, request(1, receiver.address))
    exporter.export(1, name, [0, 1, 5], states())
    assert receiver.receive(LIMIT_S).input_ids.tolist() == [0, 1, 5]
    assert done.result(LIMIT_S) is None


def test_ids_of_requests_under_way_differ(controller, exporter, receiver) -> None:
    (name,), done = registered(controller, request(1, receiver.address))
    with pytest.raises(EngineError, match="request 1 is being captured already"):
        registered(controller, request(1, receiver.address))
    exporter.export(1, name, [0, 1, 2], states())
    done.result(LIMIT_S)
    registered(controller, request(1, receiver.address))


def test_a_batch_without_requests_is_done(controller, exporter) -> None:
    assert registered(controller)[1].result(LIMIT_S) is None


def test_a_batch_ends_with_its_last_request_and_the_first_error(controller, exporter, receiver) -> None:
    names, done = registered(controller, *(request(i, receiver.address) for i in (1, 2, 3)))
    controller.fail([2, 2], EngineError("too long"))
    exporter.fail(1, RuntimeError("no memory"))
    assert not done.done()
    exporter.export(3, names[2], [0, 1, 2], states())
    with pytest.raises(EngineError, match="too long"):
        done.result(LIMIT_S)
    assert receiver.receive(LIMIT_S).request_id == 3
    controller.drain()


def test_a_hook_that_is_never_called_shows_in_health() -> None:
    with (
        CaptureController(CONTEXT, SCHEMA, send_timeout_s=0.2) as controller,
        FeatureExporter(controller.address, LIMIT_S),
    ):
        assert controller.wait_connected(LIMIT_S)
        registered(controller, request(1, "x"))
        controller.health()
        time.sleep(2 * 0.2 + 0.1)
        with pytest.raises(EngineError, match=r"captured nothing for twice engine.send_timeout_s"):
            controller.health()


def test_a_trainer_that_is_gone_fails_the_request_with_its_cause(controller, exporter, receiver) -> None:
    receiver.close()
    (name,), done = registered(controller, request(1, receiver.address))
    exporter.export(1, name, [0, 1, 2], states())
    with pytest.raises(EngineError, match="capture of request 1: PeerLost"):
        done.result(LIMIT_S)


def test_failures_of_engine_and_hook_reach_the_future(controller, exporter) -> None:
    _, by_engine = registered(controller, request(1, "x"))
    _, by_hook = registered(controller, request(2, "x"))
    controller.fail([1], EngineError("too long"))
    exporter.fail(2, RuntimeError("no memory\nat all"))
    with pytest.raises(EngineError, match="too long"):
        by_engine.result(LIMIT_S)
    with pytest.raises(EngineError, match="request 2: RuntimeError: no memory"):
        by_hook.result(LIMIT_S)


def test_no_worker_no_requests(controller) -> None:
    with pytest.raises(EngineError, match="has not connected"):
        registered(controller, request(1, "x"))


def test_only_the_holder_of_the_token_is_served(controller, receiver) -> None:
    name = controller.address.partition(":")[0]
    with pytest.raises(ProtocolError, match="refused"):
        FeatureExporter(f"{name}:forged", LIMIT_S)
    with FeatureExporter(controller.address, LIMIT_S) as exporter:
        assert controller.wait_connected(LIMIT_S)
        (known,), done = registered(controller, request(1, receiver.address))
        exporter.export(1, known, [0, 1, 2], states())
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
def test_a_stranger_that_came_first_keeps_nobody_out(controller, monkeypatch, said) -> None:
    monkeypatch.setattr("spec_processes.sockets.peer_admission.FIRST_PACKET_S", 0.2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + controller.address.partition(":")[0])
        stranger.sendall(said)
        with FeatureExporter(controller.address, LIMIT_S):
            assert controller.wait_connected(LIMIT_S)


def test_a_stranger_that_says_nothing_delays_nobody(controller) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + controller.address.partition(":")[0])
        started = time.monotonic()
        with FeatureExporter(controller.address, LIMIT_S):
            assert time.monotonic() - started < peer_admission.FIRST_PACKET_S / 2


def test_a_closed_controller_ends_what_is_pending(controller, exporter) -> None:
    _, done = registered(controller, request(1, "x"))
    controller.close()
    controller.close()
    with pytest.raises(EngineError, match="closed"):
        done.result(LIMIT_S)
    with pytest.raises(EngineError, match="closed"):
        controller.health()
    with pytest.raises(PeerLost):
        FeatureExporter(controller.address, LIMIT_S)


def test_a_request_whose_destination_cannot_be_sent_is_not_pending(controller, exporter, monkeypatch) -> None:
    _, earlier = registered(controller, request(1, "x"))
    refused: Future[None] = Future()
    monkeypatch.setattr(controller._exporter, "send", lose)
    with pytest.raises(PeerLost) as lost:
        controller.register([request(2, "y")], refused)
    refused.set_exception(lost.value)  # as an engine does
    controller.close()
    with pytest.raises(EngineError, match="closed"):
        earlier.result(0)


def lose(kind: str, **fields: object) -> None:
    raise PeerLost("the worker has gone")


_WORKER = """\
import sys, time
from spec_kit.hosting import FeatureExporter
exporter = FeatureExporter(sys.argv[1], 20.0)
print("connected", flush=True)
time.sleep(60)
"""


@pytest.fixture
def worker(controller) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-W", "error", "-c", _WORKER, controller.address]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        yield process
        process.kill()


def test_a_worker_that_dies_fails_what_is_pending(controller, worker) -> None:
    _, done = registered(controller, request(1, "x"))
    worker.kill()
    with pytest.raises(EngineError, match="worker process has ended"):
        done.result(LIMIT_S)
    with pytest.raises(EngineError, match="worker process has ended"):
        controller.health()


def test_a_stopped_worker_shows_in_health(controller, worker) -> None:
    controller.health()
    worker.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not is_ill(controller):
        time.sleep(0.1)
    with pytest.raises(EngineError, match=r"silent for timeouts.peer_s=2.0"):
        controller.health()


def is_ill(controller: CaptureController) -> bool:
    try:
        controller.health()
    except EngineError:
        return True
    return False
