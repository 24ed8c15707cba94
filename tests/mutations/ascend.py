"""The waits, events, checks and locks of the Ascend backend without which a test on the rig must fail."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ARENA, POOL, RECEIVER, SENDER = (
    f"spec_kit/streams/{name}.py" for name in ("device_arena", "device_pool", "receiver", "async_sender")
)
GROUP, AGREED = (
    f"spec_kit/collectives/{name}.py" for name in ("library_process_group", "agreed_process_group")
)
SHARING, HCCL_POOL, HCCL_GROUP, HCCL = (
    f"spec_backend_ascend/{name}.py" for name in ("npu_sharing", "hccl_pool", "hccl_process_group", "hccl")
)
IPC_TEST = "tests/rig_ascend/test_ipc_transport.py::"
HCCL_TEST = "tests/rig_ascend/test_hccl_transport.py::"
GROUP_TEST = "tests/rig_ascend/test_process_group.py::"
SUITE_TEST = GROUP_TEST + "TestHcclProcessGroup::test_"
BINDING_TEST = "tests/rig_ascend/test_hccl.py::"
HCCL_SUITE = HCCL_TEST + "TestHcclTransport::test_"
RELEASED = IPC_TEST + "test_released_memory_is_not_overwritten_before_it_has_been_read[over_the_card]"
REUSED = IPC_TEST + "test_a_ticket_is_done_when_the_device_has_copied[over_the_card]"
FOLLOWS = "test_a_sample_follows_the_work_that_makes_it"
KILLED = HCCL_SUITE + "a_killed_sender_is_lost_after_its_last_sample"
SETTLED = IPC_TEST + "test_nothing_is_being_written_once_a_view_is_settled_or_closed"
LINGERS = HCCL_TEST + "test_samples_that_wait_with_a_closed_sender_arrive_as_they_were"
STRIDED = IPC_TEST + "test_a_strided_sample_arrives_as_it_is[over_the_card]"
DIED = HCCL_TEST + "test_a_sample_that_died_with_its_sender_is_not_waited_for"
FAILS = HCCL_TEST + "test_a_transfer_that_fails_fails_its_ticket_and_no_later_sender"
ARRIVES = GROUP_TEST + "test_close_lets_what_was_issued_arrive"
UNBUILT = GROUP_TEST + "test_a_group_that_cannot_work_fails_to_build"
REFUSED = SUITE_TEST + "a_tensor_that_cannot_travel_is_refused_before_anything_is_sent"

DELETE, FALSE, OPERAND, CALL, CONTEXT, REPLACE = (
    *("DeleteStatement", "FalseCondition", "DropOperand", "DropCall", "DropContext", "ReplaceCode"),
)
COPIES, EXCHANGES, AGREES = "the card's memory", "HCCL between cards", "the group"

MUTATIONS = [
    Mutation(*row)
    for row in [
        # The card's memory
        (
            *(COPIES, SHARING, "NpuBuffer.write", DELETE),
            "stream.wait_event(self._events.open(info.event))",
            RELEASED,
        ),
        (COPIES, POOL, "DevicePool.allocate", DELETE, "self._stream.wait_event(read)", RELEASED),
        (COPIES, POOL, "DevicePool.allocate", DELETE, "_own_events[event].record(self._stream)", RELEASED),
        (
            *(COPIES, SHARING, "NpuSharing.submit", DELETE, "acl.drain(stream)"),
            IPC_TEST + "test_an_event_that_still_lies_in_torch_npus_queue_is_waited_for",
        ),
        (
            *(COPIES, POOL, "DevicePool.free", DELETE),
            "read.record(self._device_module.current_stream(self._sharing.device))",
            RELEASED,
        ),
        (COPIES, SHARING, "NpuBuffer.write", DELETE, "self._copied.record(stream)", REUSED),
        (COPIES, ARENA, "DeviceArena.free", FALSE, "read is not None", RELEASED),
        (
            *(COPIES, ARENA, "DeviceArena.readers", FALSE),
            "any(_overlap(piece, other) for other in pieces)",
            RELEASED,
        ),
        (COPIES, SHARING, "NpuBuffer._parts", CALL, "ids.contiguous()", STRIDED),
        (COPIES, SHARING, "NpuBuffer._parts", CALL, "hidden.contiguous()", STRIDED),
        (COPIES, SHARING, "NpuBuffer.settle", DELETE, "self._copied.synchronize()", SETTLED),
        (COPIES, SHARING, "NpuBuffer.close", DELETE, "self.settle()", SETTLED),
        (
            *(COPIES, POOL, "DevicePool.serves", REPLACE, "device_id == self._sharing.device_id"),
            IPC_TEST + "test_a_sender_on_another_card_goes_through_the_host",
            "True",
        ),
        # What a sender announces, and when a ticket is done
        (
            *(COPIES, RECEIVER, "StreamReceiver._read", FALSE),
            "peer.dead and not peer.pool.is_written(block)",
            DIED,
        ),
        (
            *(COPIES, RECEIVER, "StreamReceiver._greet", REPLACE),
            "pool = factory.admit(request.device_id, self._on_freed)",
            HCCL_TEST + "test_a_sample_is_received_while_another_sender_connects",
            "self._changed.release(); pool = factory.admit(request.device_id, self._on_freed); "
            "self._changed.acquire()",
        ),
        (
            *(COPIES, SHARING, "CopyOnStream.wait_sendable", DELETE, "self._copied.synchronize()"),
            IPC_TEST + FOLLOWS + "[over_the_card]",
        ),
        (
            *(EXCHANGES, HCCL_POOL, "_Transfer.wait_sent", FALSE),
            "self._buffer.num_taken < self._number or not self._sent.query()",
            KILLED,
        ),
        (EXCHANGES, HCCL_POOL, "_Transfer.wait_sent", DELETE, "self._sent.synchronize()", FAILS),
        (
            *(EXCHANGES, HCCL_POOL, "HcclBuffer.abandon", DELETE, "self._abandoned.set()"),
            HCCL_SUITE + "a_closed_receiver_completes_tickets_and_unblocks_senders",
        ),
        (
            *(EXCHANGES, SENDER, "AsyncSender.flush", REPLACE),
            "wait(list(self._open_tickets), max(0.0, deadline - time.monotonic())).not_done",
            HCCL_SUITE + "flush_returns_when_every_ticket_is_done",
            "()",
        ),
        (
            *(EXCHANGES, SENDER, "AsyncSender.close", FALSE, "isinstance(self._buffer, DeferredBuffer)"),
            IPC_TEST + "test_close_lets_a_copy_come_to_its_end",
        ),
        (
            *(EXCHANGES, SENDER, "AsyncSender.close", DELETE, "thread.join(SETTLE_S)"),
            HCCL_TEST + "test_close_settles_the_tickets_of_what_was_taken",
        ),
        # HCCL between cards
        (
            *(EXCHANGES, HCCL_POOL, "HcclBuffer.enqueue", DELETE, "self._stream.wait_event(copied)"),
            HCCL_TEST + FOLLOWS,
        ),
        (
            *(EXCHANGES, HCCL_POOL, "HcclBuffer.write", DELETE),
            "copied.record(torch.npu.current_stream(self._device))",
            HCCL_TEST + FOLLOWS,
        ),
        (
            *(EXCHANGES, HCCL_POOL, "_Transfer.__init__", REPLACE, "buffer, copied, staged", LINGERS),
            "buffer, copied, staged[:0].clone()",
        ),
        (EXCHANGES, HCCL_POOL, "HcclBuffer.enqueue", DELETE, "sent.record(self._stream)", LINGERS),
        (
            *(EXCHANGES, SENDER, "AsyncSender._close_buffer", FALSE),
            "any(thread.is_alive() for thread in self._threads[2:])",
            LINGERS,
        ),
        (EXCHANGES, SENDER, "AsyncSender._linger", DELETE, "completing.join(LINGER_S)", LINGERS, "", 0),
        (
            *(EXCHANGES, HCCL_POOL, "_Transfer.wait_sent", OPERAND, "self._buffer.num_taken < self._number"),
            KILLED,
        ),
        (
            *(EXCHANGES, HCCL_POOL, "_Transfer.wait_sent", OPERAND, "not self._sent.query()"),
            HCCL_TEST + "test_a_ticket_ends_with_its_receiver_whatever_the_device_does",
        ),
        (EXCHANGES, HCCL_POOL, "HcclBuffer.close", DELETE, "self._stream.synchronize()", FAILS),
        (EXCHANGES, HCCL_POOL, "HcclPool.is_written", REPLACE, "not block.num_tokens", DIED, "True"),
        (
            *(EXCHANGES, HCCL_POOL, "HcclPool.read", DELETE, "communicator.check()"),
            HCCL_TEST + "test_what_hccl_notices_later_fails_the_next_receive",
        ),
        (
            *(EXCHANGES, HCCL_POOL, "HcclPoolFactory.serves", OPERAND, "card != own"),
            HCCL_TEST + "test_two_ends_on_one_card_go_through_the_host",
        ),
        # The group
        (AGREES, GROUP, "LibraryProcessGroup._check", OPERAND, "not tensor.is_contiguous()", REFUSED),
        (AGREES, GROUP, "LibraryProcessGroup._check", OPERAND, "tensor.device != self.device", REFUSED),
        (
            *(AGREES, GROUP, "LibraryProcessGroup.all_reduce", FALSE, "tensor.dtype not in self.summable"),
            SUITE_TEST + "all_reduce_refuses_what_it_cannot_sum",
        ),
        (
            *(AGREES, AGREED, "AgreedProcessGroup._call", DELETE, "self._agree_with_all(hosts, name, size)"),
            SUITE_TEST + "a_killed_peer_is_lost",
        ),
        (
            *(AGREES, AGREED, "AgreedProcessGroup._checked", DELETE, "communicator.check()"),
            GROUP_TEST + "test_what_hccl_notices_later_ends_the_group",
        ),
        (AGREES, AGREED, "AgreedProcessGroup._call", DELETE, "self._queued.record()", ARRIVES),
        (
            *(AGREES, AGREED, "AgreedProcessGroup.close", FALSE),
            "self._is_busy() and time.monotonic() < deadline",
            ARRIVES,
        ),
        (
            *(AGREES, HCCL_GROUP, "HcclProcessGroup._connect", REPLACE, "value.item()", UNBUILT),
            "self.world_size",
        ),
        (
            *(AGREES, AGREED, "AgreedProcessGroup.__init__", DELETE),
            "self._refuse_shared_devices(rendezvous)",
            GROUP_TEST + "test_two_ranks_on_one_card_are_refused",
        ),
        (
            *(AGREES, HCCL_GROUP, "HcclProcessGroup._connect", REPLACE, "self.all_reduce(value)", UNBUILT),
            "value *= self.world_size",
        ),
        (
            *(AGREES, AGREED, "AgreedProcessGroup.abort", DELETE, "self._hosts.abort()"),
            SUITE_TEST + "abort_from_another_thread_unblocks_everybody",
        ),
        (
            *(AGREES, AGREED, "AgreedProcessGroup._agree_with_all", FALSE, "not torch.equal(mine, theirs)"),
            GROUP_TEST + "test_ranks_that_make_different_calls_learn_of_it_before_anything_is_sent",
        ),
        # HCCL's rules
        (
            *(EXCHANGES, HCCL, "root_info", CONTEXT, "ISSUE"),
            BINDING_TEST + "test_root_infos_are_made_one_after_the_other",
        ),
        (
            *(EXCHANGES, HCCL, "HcclCommunicator.abort", CONTEXT, "ISSUE"),
            BINDING_TEST + "test_a_communicator_is_not_destroyed_while_another_thread_issues",
        ),
        (
            *(EXCHANGES, HCCL, "HcclCommunicator.__init__", CONTEXT, "ISSUE"),
            BINDING_TEST + "test_communicators_are_made_one_after_the_other",
        ),
        (
            *(EXCHANGES, HCCL, "HcclCommunicator._issue", CONTEXT, "ISSUE"),
            BINDING_TEST + "test_calls_of_several_threads_are_issued_one_after_the_other",
        ),
    ]
]
