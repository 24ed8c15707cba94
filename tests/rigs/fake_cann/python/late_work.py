"""Samples that are written, read or replaced by work that a card has still to do."""

from dataclasses import replace

import fake_cann
import torch

from spec_testing.transport_stage import LONG_S

STALL_S = 0.15


def send(sender, sample):
    sender.send(sample, LONG_S)


def deliver(me, stage, send=send, request_id=3):
    """Rank 1 sends a sample by ``send``, and rank 0 has it bit for bit, and returns its device."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            got = receiver.receive(LONG_S)
            stage.check(got, request_id)
            return str(got.hidden_TNH.device)
    with stage.sender(me) as sender:
        send(sender, stage.sample(request_id))
        sender.flush(LONG_S)
    return None


def send_late_work(sender, real):
    """The sample is written by a task of the sender's stream that has not run when ``send`` is called."""
    ids, hidden = torch.zeros_like(real.input_ids), torch.zeros_like(real.hidden_TNH)
    fake_cann.stall(torch.npu.current_stream(), STALL_S)
    ids.copy_(real.input_ids)
    hidden.copy_(real.hidden_TNH)
    sender.send(replace(real, input_ids=ids, hidden_TNH=hidden), LONG_S)


def overwrite_once_done(sender, sample):
    """The sample's memory is overwritten as soon as its ticket is done, from a stream that waits for nothing."""
    nothing, elsewhere = torch.zeros_like(sample.hidden_TNH), torch.npu.Stream()
    fake_cann.stall(torch.npu.current_stream(), STALL_S)
    sender.send(sample, LONG_S).result(LONG_S)
    with torch.npu.stream(elsewhere):
        sample.hidden_TNH.copy_(nothing)
    elsewhere.synchronize()
