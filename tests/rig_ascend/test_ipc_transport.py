"""Features over the memory of a card and of the host: the contract with deferred streams, and every wait."""

import logging
import os
from dataclasses import replace

import fake_cann
import pytest
import torch
from late_work import STALL_S, deliver, overwrite_once_done, send_late_work

from spec_backend_ascend.backend import AscendBackend
from spec_backend_ascend.npu_sharing import NpuBuffer, NpuSharing
from spec_core.errors import ConfigError
from spec_core.records import FeatureSample
from spec_kit.streams import async_sender
from spec_kit.streams.device_pool import DevicePool
from spec_kit.streams.ipc_transport import IpcTransport
from spec_kit.streams.wire import Packet, PacketKind, SampleLayout
from spec_testing import TransportSuite
from spec_testing.processes import run_ranks
from spec_testing.transport_stage import LONG_S, SCHEMA, UNIT, UNIT_BYTES, Stage


def build(ipc):
    backend = AscendBackend(AscendBackend.Config(name="ascend", ipc=ipc))
    backend.device(0)
    return backend.transport("colocated")


def over_the_card():
    return build("required")


def over_the_host():
    return build("never")


class TestIpcTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return over_the_card

    @pytest.fixture
    def device(self):
        return "npu"


class TestHostFallback(TransportSuite):
    @pytest.fixture
    def build(self):
        return over_the_host

    @pytest.fixture
    def device(self):
        return "npu"


BOTH = pytest.mark.parametrize("build", [over_the_card, over_the_host])


@BOTH
def test_a_sample_follows_the_work_that_makes_it(build):
    run_ranks(deliver, 2, Stage(build, "npu"), send_late_work)


@BOTH
def test_a_ticket_is_done_when_the_device_has_copied(build):
    run_ranks(deliver, 2, Stage(build, "npu"), overwrite_once_done)


def release_before_reading(me, stage, record_s=0.0):
    """The receiver's stream still has to read what was released, while another sample takes its place. Its events may
    reach the device late, from torch_npu's queue."""
    if me.rank == 1:
        with stage.sender(me) as sender:
            for request_id in range(2):
                sender.send(stage.sample(request_id), LONG_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me, UNIT_BYTES) as receiver:
        got = receiver.receive(LONG_S)
        mine = torch.zeros_like(got.hidden_TNH)
        fake_cann.stall(torch.npu.current_stream(), STALL_S)
        mine.copy_(got.hidden_TNH)
        fake_cann.slow("aclrtRecordEvent", record_s)
        receiver.release(got)
        stage.check(receiver.receive(LONG_S), 1)
        assert torch.equal(bits(mine), bits(stage.sample(0).hidden_TNH))


def bits(tensor):
    return tensor.view(-1).view(torch.uint8)


@BOTH
def test_released_memory_is_not_overwritten_before_it_has_been_read(build):
    run_ranks(release_before_reading, 2, Stage(build, "npu"))


def test_an_event_that_still_lies_in_torch_npus_queue_is_waited_for():
    run_ranks(release_before_reading, 2, Stage(over_the_card, "npu"), STALL_S / 3)


def send_strided(sender, real):
    hidden = real.hidden_TNH.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    ids = torch.stack([real.input_ids, real.input_ids], dim=1)[:, 0]
    assert not hidden.is_contiguous()
    assert not ids.is_contiguous()
    sender.send(replace(real, input_ids=ids, hidden_TNH=hidden), LONG_S)


@BOTH
def test_a_strided_sample_arrives_as_it_is(build):
    run_ranks(deliver, 2, Stage(build, "npu"), send_strided)


def send_from_the_host(sender, real):
    sender.send(replace(real, input_ids=real.input_ids.cpu(), hidden_TNH=real.hidden_TNH.cpu()), LONG_S)


@BOTH
def test_a_sample_in_the_hosts_memory_arrives_on_the_card(build):
    run_ranks(deliver, 2, Stage(build, "npu"), send_from_the_host)


def from_another_card(me):
    backend = AscendBackend(AscendBackend.Config(name="ascend", ipc="required"))
    backend.device(me.rank)
    device = deliver(me, Stage(lambda: backend.transport("colocated"), "npu"))
    assert device == (None if me.rank else "npu:0")
    assert not me.rank or fake_cann.calls("aclrtIpcMemImportByKey") == 0


def test_a_sender_on_another_card_goes_through_the_host():
    run_ranks(from_another_card, 2)


@pytest.mark.parametrize("code", [fake_cann.NOT_SUPPORTED])
def test_a_card_that_shares_no_memory_is_a_warning_and_the_host_carries_features(code, caplog):
    over_the_card()  # chooses the card
    transport = IpcTransport(NpuSharing, share_device=True)
    fake_cann.fail("aclrtIpcMemGetExportKey", code)
    with (
        caplog.at_level(logging.WARNING),
        transport.listen(SCHEMA, 4 * UNIT_BYTES) as receiver,
        transport.connect(receiver.address, SCHEMA, LONG_S) as sender,
    ):
        sample = Stage(over_the_card, "npu").sample(1)
        sender.send(sample, LONG_S)
        assert torch.equal(receiver.receive(LONG_S).input_ids, sample.input_ids)
    assert "features go through the host" in caplog.text


def test_a_card_that_shares_no_memory_is_an_error_where_that_is_required():
    transport = over_the_card()
    fake_cann.fail("aclrtIpcMemGetExportKey", fake_cann.NOT_SUPPORTED)
    with pytest.raises(ConfigError, match=r"backend\.ipc=required, but npu:0"):
        transport.listen(SCHEMA, 4 * UNIT_BYTES)


def test_an_arena_that_does_not_fit_the_card_is_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError):
        over_the_card().listen(SCHEMA, 1 << 40)


def test_a_copy_that_fails_fails_its_ticket():
    transport = over_the_card()
    with (
        transport.listen(SCHEMA, 4 * UNIT_BYTES) as receiver,
        transport.connect(receiver.address, SCHEMA, LONG_S) as sender,
    ):
        sample = Stage(over_the_card, "npu").sample(1, UNIT)
        torch.npu.synchronize()
        fake_cann.fail("aclrtSynchronizeEvent", fake_cann.TASK_FAILED)
        ticket = sender.send(sample, LONG_S)
        assert "failed" in str(ticket.exception(LONG_S))


def lend(me, stage):
    """A pool without a stream: rank 1 writes to it by hand."""
    layout, device = SampleLayout(SCHEMA), torch.device("npu", 0)
    stage.build()
    pool = DevicePool(layout, 4 * UNIT_BYTES, NpuSharing(device))
    blocks = [pool.allocate(UNIT) for _ in range(2)]
    me.publish(
        (os.getpid(), pool.descriptor, [(block.offset, pool.grant_payload(block)) for block in blocks])
    )
    for request_id, block in enumerate(blocks):
        assert me.receive() == "settled"
        ids, hidden = pool.read(block)
        stage.check(FeatureSample(request_id=request_id, input_ids=ids, hidden_TNH=hidden), request_id)
    pool.close()


def write_by_hand(me, stage):
    if me.rank == 0:
        lend(me, stage)
        return
    stage.build()
    pid, number, grants = me.receive()
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    view = NpuBuffer(descriptor, torch.device("npu", 0))
    os.close(descriptor)
    for request_id, (grant, end) in enumerate(zip(grants, (view.settle, view.close), strict=True)):
        sample = stage.sample(request_id)
        fake_cann.stall(torch.npu.current_stream(), STALL_S)
        view.write(Packet(PacketKind.GRANT, request_id, *grant), sample)
        end()
        me.publish("settled")


def test_nothing_is_being_written_once_a_view_is_settled_or_closed():
    run_ranks(write_by_hand, 2, Stage(over_the_card, "npu"))


def test_close_lets_a_copy_come_to_its_end():
    transport = over_the_card()
    with transport.listen(SCHEMA, 4 * UNIT_BYTES) as receiver:
        sender = transport.connect(receiver.address, SCHEMA, LONG_S)
        sample = Stage(over_the_card, "npu").sample(1)
        fake_cann.stall(torch.npu.current_stream(), 2 * async_sender.SETTLE_S)
        sender.send(sample, LONG_S)
        sender.close()
        assert torch.equal(receiver.receive(LONG_S).input_ids, sample.input_ids)
