"""Features from GPU to GPU over NCCL: the transport's contract, and other work of the same GPUs."""

import time

import pytest
import torch

from spec_core.errors import DeadlineExceeded
from spec_core.records import FeatureSample
from spec_testing import TransportSuite
from spec_testing.process_group_ranks import joined
from spec_testing.processes import Rank, run_ranks
from spec_testing.resources import settled_resources

from .two_gpus import (
    AVAILABILITY,
    LONG_S,
    SAMPLE_BYTES,
    SCHEMA,
    SHORT_S,
    TOKENS,
    OnTwoGpus,
    check,
    device_is_idle,
    listening,
    multi_gpu,
    nccl,
    sample,
    take,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABILITY.ok, reason=AVAILABILITY.reason)]

CYCLES = 400_000_000
"""The device sleeps for about 0.2 s."""
NOISE_BYTES = 8 << 20


@multi_gpu
class TestNcclTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return OnTwoGpus

    @pytest.fixture
    def device(self):
        return "cuda"


def send_to_an_idle_trainer(me: Rank) -> None:
    """Nobody calls ``receive``: a window of samples arrives all the same, and keeps no GPU busy."""
    if me.rank == 0:
        with listening(me, 3 * SAMPLE_BYTES) as receiver:
            assert me.receive() == "full"
            device_is_idle(1.0)
            for number in range(4):
                take(receiver, number)
        return
    with OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S) as sender:
        for ticket in [sender.send(sample(number), LONG_S) for number in range(3)]:
            ticket.result(LONG_S)
        with pytest.raises(DeadlineExceeded):
            sender.send(sample(3), SHORT_S)
        device_is_idle(1.0)
        me.publish("full")
        sender.send(sample(3), LONG_S).result(LONG_S)


@multi_gpu
def test_a_trainer_that_does_not_receive_keeps_no_gpu_waiting():
    run_ranks(send_to_an_idle_trainer, 2, timeout_s=60)


def send_late(me: Rank) -> float:
    """The sender's GPU is busy with what makes the sample; its host does not wait, and may write over it at once."""
    if me.rank == 0:
        with listening(me, 4 * SAMPLE_BYTES) as receiver:
            take(receiver, 1)
            take(receiver, 7)
        return 0.0
    with OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S) as sender:
        sender.send(sample(1), LONG_S).result(LONG_S)
        sent, late = sample(7), sample(0)
        torch.cuda.synchronize()
        started = time.monotonic()
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(CYCLES)
        late.hidden_TNH.copy_(sent.hidden_TNH)
        late.input_ids.copy_(sent.input_ids)
        ticket = sender.send(
            FeatureSample(request_id=7, input_ids=late.input_ids, hidden_TNH=late.hidden_TNH), LONG_S
        )
        late.hidden_TNH.fill_(9)
        late.input_ids.fill_(9)
        took = time.monotonic() - started
        torch.cuda.set_sync_debug_mode("default")
        ticket.result(LONG_S)
        return took


@multi_gpu
def test_a_sample_follows_the_work_that_makes_it_and_send_waits_for_neither():
    assert max(run_ranks(send_late, 2, timeout_s=60)) < 0.1


def read_late(me: Rank) -> None:
    """The trainer's GPU comes to a sample long after it was released; the next one goes into the same room."""
    if me.rank == 0:
        with listening(me, SAMPLE_BYTES) as receiver:
            copies = []
            for _ in range(6):
                got = receiver.receive(LONG_S)
                torch.cuda._sleep(CYCLES // 4)
                copies.append(got.hidden_TNH.clone())
                receiver.release(got)
            assert [copy.unique().tolist() for copy in copies] == [[float(number)] for number in range(6)]
        return
    with OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S) as sender:
        for number in range(6):
            sender.send(sample(number), LONG_S)
        sender.flush(LONG_S)


@multi_gpu
def test_room_is_overwritten_only_when_its_reader_is_through():
    run_ranks(read_late, 2, timeout_s=60)


def soak(me: Rank, samples: int) -> None:
    """Two senders, mixed sizes; what the processes hold stays as it was after the first tenth."""
    tokens = [TOKENS, 17, 3 * TOKENS, 0, 640]
    if me.rank > 0:
        with OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S) as sender:
            me.publish("connected")
            me.receive()
            for number in range(me.rank * samples, (me.rank + 1) * samples):
                sender.send(sample(number, tokens[number % 5]), LONG_S)
                if number % samples == samples // 10:
                    before = held()
            sender.flush(LONG_S)
            assert_same(before, held())
            me.publish("measured")
            me.receive()
            me.receive()
        return
    with listening(me, 8 * SAMPLE_BYTES) as receiver:
        assert [me.receive(), me.receive()] == ["connected", "connected"]
        expected = {1: samples, 2: 2 * samples}
        for count in range(2 * samples):
            got = receiver.receive(LONG_S)
            check(got, expected[got.request_id // samples], tokens[got.request_id % 5])
            expected[got.request_id // samples] += 1
            receiver.release(got)
            if count == samples // 5:
                before = held()
        assert_same(before, held())
        assert [me.receive(), me.receive()] == ["measured", "measured"]
        me.publish("measured")


def held() -> tuple[object, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return settled_resources(), torch.cuda.memory_reserved()


def assert_same(before: tuple[object, int], after: tuple[object, int]) -> None:
    assert after[0] == before[0]
    assert after[1] <= before[1] + NOISE_BYTES


@multi_gpu
def test_two_senders_soak_with_flat_memory():
    run_ranks(soak, 3, 400, timeout_s=90)


def stream_beside_collectives(me: Rank) -> None:
    """Both GPUs also reduce with each other, as the ranks of a trainer do, on streams of torch's own group."""
    import torch.distributed as dist

    torch.cuda.set_device(me.rank)
    with joined(me) as rendezvous:
        store = rendezvous.store("default")
        dist.init_process_group(
            "nccl", store=store, rank=me.rank, world_size=2, device_id=torch.device("cuda", me.rank)
        )
        weights = torch.ones(32 << 20, device="cuda")
        if me.rank == 0:
            with listening(me, 4 * SAMPLE_BYTES) as receiver:
                for number in range(100):
                    dist.all_reduce(weights)
                    take(receiver, number)
                    dist.all_reduce(weights)
                    weights.fill_(1.0)
        else:
            with OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S) as sender:
                for number in range(100):
                    sender.send(sample(number), LONG_S)
                    dist.all_reduce(weights)
                    dist.all_reduce(weights)
                    weights.fill_(1.0)
                sender.flush(LONG_S)
        device_is_idle()
        dist.destroy_process_group()


@multi_gpu
def test_features_travel_beside_collectives_of_the_same_gpus():
    run_ranks(stream_beside_collectives, 2, timeout_s=90)


def send_within_one_gpu(me: Rank) -> None:
    torch.cuda.set_device(0)
    if me.rank == 0:
        with listening(me, 2 * SAMPLE_BYTES) as receiver:
            take(receiver, 4)
        return
    with nccl().connect(me.receive(), SCHEMA, LONG_S) as sender:
        sender.send(sample(4), LONG_S)
        sender.flush(LONG_S)


def test_two_ends_on_one_gpu_go_through_the_host():
    run_ranks(send_within_one_gpu, 2, timeout_s=60)
