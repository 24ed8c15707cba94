"""Features between processes of one GPU: the transport's contract, and the order of work on the device."""

import contextlib
import gc
import time
from collections.abc import Generator

import pytest
import torch

from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_core import Transport
from spec_core.errors import PeerLost, RunError
from spec_core.records import FeatureSample, FeatureSchema
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_testing import TransportSuite
from spec_testing.processes import Fault, Rank, run_ranks, watch_ranks

AVAILABILITY = CudaBackend.probe()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABILITY.ok, reason=AVAILABILITY.reason)]

SCHEMA = FeatureSchema(layers=(1, 2), hidden_size=1024, dtype="bfloat16")
TOKENS = 2048
SAMPLE_BYTES = TOKENS * (8 + SCHEMA.bytes_per_token())
LONG_S, SHORT_S = 20.0, 0.5
NOISE_BYTES = 2 << 20
"""Bytes that an MPS server may keep for clients to come; an arena of these tests is 270 times as large."""
CYCLES = 400_000_000
"""The device sleeps for about 0.2 s."""


def over_the_device() -> Transport:
    return CudaBackend(CudaConfig(name="cuda")).transport("colocated")


def over_the_host() -> Transport:
    return CudaBackend(CudaConfig(name="cuda", ipc="never")).transport("colocated")


class TestIpcTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return over_the_device

    @pytest.fixture
    def device(self):
        return "cuda"


class TestHostFallback(TestIpcTransport):
    @pytest.fixture
    def build(self):
        return over_the_host


def sample(number: int) -> FeatureSample:
    hidden = torch.full(SCHEMA.shape(TOKENS), float(number), dtype=torch.bfloat16, device="cuda")
    return FeatureSample(
        request_id=number, input_ids=torch.full((TOKENS,), number, device="cuda"), hidden_TNH=hidden
    )


@contextlib.contextmanager
def no_host_wait() -> Generator[None]:
    """torch raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def values(got: FeatureSample) -> set[float]:
    return {*got.hidden_TNH.unique().tolist(), *got.input_ids.unique().tolist()}


def send_late(me: Rank) -> float:
    """The sender's device is busy; its host is not, and neither is the receiver's."""
    if me.rank == 0:
        with over_the_device().listen(SCHEMA, 2 * SAMPLE_BYTES) as receiver:
            me.publish(receiver.address)
            got = receiver.receive(LONG_S)
            receiver.release(got)
            me.receive()
            started = time.monotonic()
            with no_host_wait():
                got = receiver.receive(LONG_S)
            waited = time.monotonic() - started
            assert values(got) == {7.0}
            receiver.release(got)
            me.publish("done")
        return waited
    with over_the_device().connect(me.receive(), SCHEMA, LONG_S) as sender:
        sender.send(sample(1), LONG_S)
        sent = sample(0)
        torch.cuda.synchronize()
        started = time.monotonic()
        with no_host_wait():
            torch.cuda._sleep(CYCLES)
            sent.hidden_TNH.fill_(7)
            sent.input_ids.fill_(7)
            sender.send(sent, LONG_S).result(0)
            sent.hidden_TNH.fill_(9)  # T2: on this stream, that comes after the copy
            sent.input_ids.fill_(9)
        took = time.monotonic() - started
        me.publish("sent")
        me.receive()
    return took


def test_neither_host_waits_for_a_busy_device_and_the_reader_sees_what_was_sent():
    assert max(run_ranks(send_late, 2)) < 0.1


def read_late(me: Rank) -> None:
    """The receiver's device is busy when the block is released; the next sample goes into the same block."""
    if me.rank == 0:
        with over_the_device().listen(SCHEMA, SAMPLE_BYTES) as receiver:
            me.publish(receiver.address)
            copies = []
            for _ in range(6):
                got = receiver.receive(LONG_S)
                torch.cuda._sleep(CYCLES // 4)
                copies.append(got.hidden_TNH.clone())
                receiver.release(got)
            assert [copy.unique().tolist() for copy in copies] == [[float(number)] for number in range(6)]
            me.publish("done")
        return
    with over_the_device().connect(me.receive(), SCHEMA, LONG_S) as sender:
        for number in range(6):
            sender.send(sample(number), LONG_S)
        me.receive()


def test_a_block_is_overwritten_only_when_its_reader_is_through():
    run_ranks(read_late, 2)


def die_before_the_copy(me: Rank) -> str | None:
    """A sender whose host has sent a sample is killed while its device has not come to it."""
    if me.rank == 1:
        sender = over_the_device().connect(me.receive(), SCHEMA, LONG_S)
        sender.send(sample(0), LONG_S)
        me.receive()
        torch.cuda._sleep(20 * CYCLES)
        sender.send(sample(1), LONG_S)
        me.reach("fault")
        return None
    with over_the_device().listen(SCHEMA, 4 * SAMPLE_BYTES) as receiver:
        me.publish(receiver.address)
        assert values(receiver.receive(LONG_S)) == {0.0}
        me.publish("go on")
        time.sleep(1.0)
        try:
            got = receiver.receive(LONG_S)
        except PeerLost as error:
            return str(error)
        return f"delivered {values(got)}"


def test_a_sample_that_a_killed_sender_had_only_announced_is_lost_or_whole():
    found = watch_ranks(die_before_the_copy, 2, faults={(1, "fault"): Fault.KILL}, timeout_s=40)[0]
    assert found.trace == ""
    assert "while it sent sample 1" in found.value or found.value == "delivered {1.0}"


def be_reading_when_the_sender_dies(me: Rank) -> str | None:
    """As above, but the receiver's stream already waits for the copy: it must not wait for ever."""
    if me.rank == 1:
        sender = over_the_device().connect(me.receive(), SCHEMA, LONG_S)
        torch.cuda._sleep(20 * CYCLES)
        sender.send(sample(1), LONG_S)
        me.publish("sent")
        me.receive()
        me.reach("fault")
        return None
    with over_the_device().listen(SCHEMA, 4 * SAMPLE_BYTES) as receiver:
        me.publish(receiver.address)
        me.receive()
        got = receiver.receive(LONG_S)
        me.publish("received")
        with contextlib.suppress(RunError):
            receiver.receive(LONG_S)
        started = time.monotonic()
        got.hidden_TNH.sum().item()
        return f"{time.monotonic() - started:.1f}"


def test_a_stream_that_waits_for_a_sender_that_dies_goes_on():
    found = watch_ranks(be_reading_when_the_sender_dies, 2, faults={(1, "fault"): Fault.KILL}, timeout_s=25)[
        0
    ]
    assert found.trace == ""
    assert float(found.value) < 10


def used_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def hold_memory(me: Rank) -> None:
    if me.rank == 0:
        receiver = over_the_device().listen(SCHEMA, 64 * SAMPLE_BYTES)
        me.publish(receiver.address)
        receiver.receive(LONG_S)
        me.reach("fault")
        return
    sender = over_the_device().connect(me.receive(), SCHEMA, LONG_S)
    sender.send(sample(0), LONG_S)
    sender.flush(LONG_S)
    me.reach("fault")


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["receiver", "sender", "both"])
def test_killed_processes_leave_no_device_memory(victims):
    torch.cuda.init()
    before = used_bytes()
    watch_ranks(hold_memory, 2, faults={(rank, "fault"): Fault.KILL for rank in victims})
    deadline = time.monotonic() + 10
    while used_bytes() > before + NOISE_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used_bytes() <= before + NOISE_BYTES


def test_closing_frees_the_device_memory_when_its_last_sample_goes():
    torch.cuda.init()
    with (
        over_the_device().listen(SCHEMA, SAMPLE_BYTES) as warm_up,
        over_the_device().connect(warm_up.address, SCHEMA, LONG_S) as sender,
    ):
        sender.send(sample(0), LONG_S)
        warm_up.receive(LONG_S)
    before = used_bytes()
    receiver = over_the_device().listen(SCHEMA, 64 * SAMPLE_BYTES)
    assert used_bytes() >= before + 64 * SAMPLE_BYTES
    with over_the_device().connect(receiver.address, SCHEMA, LONG_S) as sender:
        sender.send(sample(3), LONG_S)
        got = receiver.receive(LONG_S)
    receiver.close()
    assert values(got) == {3.0}
    assert used_bytes() >= before + 64 * SAMPLE_BYTES
    del got
    assert used_bytes() <= before


def test_a_sender_of_the_host_reaches_a_receiver_on_the_device():
    hidden = torch.randn(SCHEMA.shape(5)).bfloat16()
    sent = FeatureSample(request_id=5, input_ids=torch.arange(5), hidden_TNH=hidden)
    with (
        over_the_device().listen(SCHEMA, SAMPLE_BYTES) as receiver,
        SharedMemoryTransport().connect(receiver.address, SCHEMA, LONG_S) as sender,
    ):
        sender.send(sent, LONG_S)
        got = receiver.receive(LONG_S)
        assert got.hidden_TNH.device.type == "cuda"
        assert torch.equal(got.hidden_TNH.cpu(), hidden)
        receiver.release(got)


def test_tensors_of_the_host_and_strided_ones_travel_through_the_device_too():
    hidden = torch.randn(12, 2, 1024).bfloat16()
    with (
        over_the_device().listen(SCHEMA, SAMPLE_BYTES) as receiver,
        over_the_device().connect(receiver.address, SCHEMA, LONG_S) as sender,
    ):
        for ids, states in (
            (torch.arange(12)[::3], hidden.cuda()[::3]),
            (torch.arange(12)[::3].pin_memory(), hidden[::3].pin_memory()),
        ):
            sender.send(FeatureSample(request_id=1, input_ids=ids, hidden_TNH=states), LONG_S).result()
            ids.zero_()
            got = receiver.receive(LONG_S)
            assert got.input_ids.tolist() == [0, 3, 6, 9]
            assert torch.equal(got.hidden_TNH.cpu(), hidden[::3])
            receiver.release(got)


def send_from_the_second_device(me: Rank) -> None:
    torch.cuda.set_device(me.rank)
    if me.rank == 0:
        with over_the_device().listen(SCHEMA, 2 * SAMPLE_BYTES) as receiver:
            me.publish(receiver.address)
            got = receiver.receive(LONG_S)
            assert got.hidden_TNH.device == torch.device("cuda", 0)
            assert values(got) == {4.0}
            receiver.release(got)
        return
    with over_the_device().connect(me.receive(), SCHEMA, LONG_S) as sender:
        sender.send(sample(4), LONG_S)


@pytest.mark.multi_gpu
@pytest.mark.skipif(CudaBackend.capabilities().num_devices < 2, reason="two GPUs are needed")
def test_a_sender_on_another_device_goes_through_the_host():
    run_ranks(send_from_the_second_device, 2)
