"""Deaths of a sender or a receiver while a sample travels over NCCL."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spec_core import FeatureReceiver, FeatureSender
from spec_core.errors import PeerLost
from spec_testing.processes import Fault, Rank, watch_ranks

from .two_gpus import (
    LONG_S,
    SAMPLE_BYTES,
    SCHEMA,
    OnTwoGpus,
    device_is_idle,
    listening,
    multi_gpu,
    sample,
    take,
)


def leave_a_receive_waiting(me: Rank) -> str | None:
    """The sender announces its second sample, and dies before its GPU sends it."""
    if me.rank == 1:
        from spec_backend_cuda.nccl_link import NcclLink

        sender = OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S)
        sender.send(sample(0), LONG_S).result(LONG_S)
        NcclLink.start = say_only
        sender.send(sample(1), LONG_S)
        time.sleep(1.0)
        me.reach("fault")
        return None
    with listening(me, 4 * SAMPLE_BYTES) as receiver:
        take(receiver, 0)
        with pytest.raises(PeerLost, match="has died"):
            receiver.receive(LONG_S)
        device_is_idle()
        return "lost"


def say_only(link: object, parts: Sequence[Tensor]) -> None:
    """Instead of ``NcclLink.start``."""


@multi_gpu
def test_a_killed_sender_is_lost_and_the_receivers_gpu_goes_on():
    found = watch_ranks(leave_a_receive_waiting, 2, faults={(1, "fault"): Fault.KILL}, timeout_s=60)[0]
    assert found.trace == ""
    assert found.value == "lost"


def leave_a_send_waiting(me: Rank) -> list[str] | None:
    """The receiver dies before its GPU receives what the sender's GPU already sends."""
    if me.rank == 0:
        from spec_backend_cuda.nccl_link import NcclLink

        with listening(me, 4 * SAMPLE_BYTES) as receiver:
            take(receiver, 0)
            NcclLink.start = never
            me.publish("deaf")
            me.receive()
            time.sleep(1.0)
            me.reach("fault")
        return None
    sender = OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S)
    sender.send(sample(0), LONG_S)
    me.receive()
    tickets = [sender.send(sample(number), LONG_S) for number in (1, 2)]
    me.publish("sent")
    found = [type(ticket.exception(LONG_S)).__name__ for ticket in tickets]
    with pytest.raises(PeerLost):
        sender.send(sample(3), LONG_S)
    sender.close()
    device_is_idle()
    return found


def never(link: object, parts: Sequence[Tensor]) -> None:
    """Instead of ``NcclLink.start``."""
    time.sleep(1000)


@multi_gpu
def test_a_killed_receiver_fails_the_tickets_and_the_senders_gpu_goes_on():
    found = watch_ranks(leave_a_send_waiting, 2, faults={(0, "fault"): Fault.KILL}, timeout_s=60)[1]
    assert found.trace == ""
    # A small sample is through at its sender's end when it lies in NCCL's buffers at the receiver's.
    assert found.value in (["PeerLost", "PeerLost"], ["NoneType", "PeerLost"])


def die_while_streaming(me: Rank) -> int | None:
    """At no chosen moment: large samples, one after the other. Another sender takes over."""
    if me.rank == 1:
        sender = OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S)
        me.receive()  # the other one is connected
        threading.Thread(target=stream_for_ever, args=(sender,), daemon=True).start()
        time.sleep(0.5)
        me.reach("fault")
        return None
    if me.rank == 2:
        with OnTwoGpus().connect(me.receive(), SCHEMA, LONG_S) as sender:
            me.publish("connected")
            assert me.receive() == "lost"
            for number in range(20):
                sender.send(sample(number), LONG_S)
            sender.flush(LONG_S)
        return None
    with listening(me, 4 * SAMPLE_BYTES) as receiver:
        me.receive()
        taken = take_until_lost(receiver)
        me.publish("lost")
        for number in range(20):
            take(receiver, number)
        device_is_idle()
        return taken


def stream_for_ever(sender: FeatureSender) -> None:
    torch.cuda.set_device(1)
    number = 0
    while True:
        sender.send(sample(number), LONG_S)
        number += 1


def take_until_lost(receiver: FeatureReceiver) -> int:
    number = 0
    while True:
        try:
            take(receiver, number)
        except PeerLost:
            return number
        number += 1


@multi_gpu
def test_samples_of_a_killed_sender_are_whole_and_other_senders_go_on():
    found = watch_ranks(die_while_streaming, 3, faults={(1, "fault"): Fault.KILL}, timeout_s=60)[0]
    assert found.trace == ""
    assert found.value > 0
