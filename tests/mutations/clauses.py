"""The changes by which a test of each clause of a contract must fail."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

GLOO, GROUP = "spec_kit/collectives/gloo_process_group.py", "spec_kit/collectives/library_process_group.py"
SENDER, RECEIVER, WINDOW = (f"spec_kit/streams/{name}.py" for name in ("sender", "receiver", "window"))
INLINE, HOST_POOL, ARENA = (
    f"spec_kit/streams/{name}.py" for name in ("inline_transport", "host_pool", "shared_memory")
)
ADDRESSES = "spec_processes/sockets/addresses.py"
RENDEZVOUS, SERVER = (f"spec_processes/sockets/{name}.py" for name in ("rendezvous", "rendezvous_server"))
UPDATES, PUSH, PUBLISHER = (f"spec_kit/weight_sync/{name}.py" for name in ("receiver", "push", "publisher"))
SHARDED = "spec_kit/sharding/sharded_state.py"
CONTROL, REAPER = "spec_processes/control.py", "spec_processes/reaper.py"

GROUP_TEST = "tests/contract/test_cpu_process_group.py::TestGlooProcessGroup::test_"
SHM_TEST = "tests/contract/test_cpu_transports.py::TestSharedMemoryTransport::test_"
INLINE_TEST = "tests/contract/test_cpu_transports.py::TestInlineTransport::test_"
SHM_UNIT = "tests/unit/kit/streams/test_shared_memory_transport.py::test_a_"
RENDEZVOUS_TEST = "tests/unit/processes/sockets/test_rendezvous.py::test_"
UPDATE_TEST = "tests/unit/kit/weight_sync/test_receiver.py::test_"
PUBLISHER_TEST = "tests/unit/kit/weight_sync/test_publisher.py::test_"
SHARDED_TEST = "tests/unit/kit/sharding/test_sharded_state.py::test_"
LAUNCHER_TEST = "tests/contract/test_local_launcher.py::TestLocalLauncher::test_"
LET_GO = PUBLISHER_TEST + "what_transports_keep_is_released_with_a_replica_a_publisher_and_a_receiver"
NO_DAMAGE = "tests/contract/test_weight_transports.py::TestFileTransport::test_damage_is_never_served"
BIT_FOR_BIT = GROUP_TEST + "every_dtype_and_shape_arrives_bit_for_bit"
REFUSED = GROUP_TEST + "a_tensor_that_cannot_travel_is_refused_before_anything_is_sent"
WAITS = SHM_TEST + "a_send_beyond_the_window_waits_for_a_release"
KILLED = SHM_TEST + "a_sender_killed_while_it_waits_leaves_room_for_the_others"
LAST = SHM_TEST + "a_closed_sender_is_lost_after_its_last_sample"
STAYS = SHM_TEST + "a_held_sample_stays_as_it_is"
CLEAN = SHM_TEST + "close_twice_leaves_nothing_behind"
TOLD_WHY = RENDEZVOUS_TEST + "who_does_not_belong_is_told_why"

DELETE, FALSE, TRUE, OPERAND, CALL, REPLACE = (
    *("DeleteStatement", "FalseCondition", "TrueCondition", "DropOperand", "DropCall", "ReplaceCode"),
)
LEAK = "globals().setdefault('LEAKED', []).append"
"""A call that keeps an object alive as long as the process."""

MUTATIONS = [
    Mutation(*row)
    for row in [
        # Draft replica
        (
            *("U3", UPDATES, "UpdateReceiver.commit", FALSE, 'not self._is(update, "received")'),
            UPDATE_TEST + "update_that_was_not_received_can_be_neither_committed_nor_reverted[commit]",
        ),
        (
            *("U3", PUSH, "Push.run", TRUE, 'delivery.state == "received"'),
            PUBLISHER_TEST + "each_of_three_commits_for_itself[load-aborted]",
        ),
        (
            *("U10", PUSH, "Push.run", FALSE, "self.version_is_taken"),
            PUBLISHER_TEST + "version_that_is_taken_at_one_replica_is_committed_at_none",
        ),
        (
            *("U6", UPDATES, "UpdateReceiver._check", FALSE),
            "last is not None and update.fence < last.fence",
            UPDATE_TEST + "request_is_refused",
        ),
        (
            *("U6", UPDATES, "UpdateReceiver._check", FALSE),
            "last is not None and update.precedence <= last.precedence",
            UPDATE_TEST + "request_is_refused",
        ),
        (
            *("U10", UPDATES, "_Transfer._load", DELETE, "self._owner.check_version(self.manifest)"),
            UPDATE_TEST + "version_names_one_draft_for_good",
        ),
        (
            *("U10", UPDATES, "_Transfer._checked", FALSE, "problem := finite.problem()"),
            UPDATE_TEST + "what_arrives_with_nan_or_infinity_is_not_committed[nan]",
        ),
        (
            *("U7", UPDATES, "_Transfer._run", DELETE, "self._owner.give_up(update, cause(error))"),
            UPDATE_TEST + "publisher_that_is_not_there_ends_in_the_status",
        ),
        ("U7", UPDATES, "_Transfer._checked", FALSE, "digest != expected_digests[name]", NO_DAMAGE),
        ("U7", UPDATES, "_Transfer._checked", FALSE, "missing", NO_DAMAGE),
        (
            *(
                "U8",
                UPDATES,
                "UpdateReceiver._quarantine",
                REPLACE,
                'self._set("quarantined", reason=reason)',
            ),
            UPDATE_TEST + "update_that_fails_after_a_failed_swap_leaves_the_quarantine",
            'self._set("aborted", reason=reason)',
        ),
        # Weight transport
        ("W7", PUBLISHER, "Publisher._remove", DELETE, "transport.forget(name)", LET_GO),
        ("W7", PUBLISHER, "Publisher.close", DELETE, "transport.close()", LET_GO),
        ("W7", UPDATES, "UpdateReceiver.close", DELETE, "transport.close()", LET_GO),
        # Process group
        ("P1", GROUP, "LibraryProcessGroup._bytes", CALL, "tensor.view(-1).view(torch.uint8)", BIT_FOR_BIT),
        ("P1", GLOO, "_Gloo.broadcast", REPLACE, "src, 0", BIT_FOR_BIT + "[broadcast]", "0, 0"),
        (
            *("P2", GLOO, "_Gloo.all_reduce", REPLACE, "[tensor]"),
            GROUP_TEST + "all_reduce_sums_in_place",
            "[tensor.clone()]",
        ),
        (
            *("P2", GROUP, "LibraryProcessGroup.all_reduce", FALSE, "tensor.dtype not in self.summable"),
            GROUP_TEST + "all_reduce_refuses_what_it_cannot_sum",
        ),
        (
            *("P3", GLOO, "_Gloo.all_reduce", REPLACE, "self._gloo.allreduce([tensor]).wait()"),
            GROUP_TEST + "calls_follow_the_work_before_and_precede_the_work_after",
            LEAK + "(self._gloo.allreduce([tensor]))",
        ),
        ("P4", GROUP, "LibraryProcessGroup._check", OPERAND, "not tensor.is_contiguous()", REFUSED),
        ("P4", GROUP, "LibraryProcessGroup._check", OPERAND, "tensor.device != self.device", REFUSED),
        (
            *("P5", GLOO, "GlooProcessGroup.__init__", REPLACE, 'store = rendezvous.store("gloo")'),
            GROUP_TEST + "the_default_group_is_neither_needed_nor_touched",
            'store = rendezvous.store("gloo")\n'
            'torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)',
        ),
        (
            *("P6", GLOO, "_options", REPLACE, "dt.timedelta(seconds=timeout_s)"),
            GROUP_TEST + "a_stopped_peer_exceeds_the_deadline",
            "dt.timedelta(seconds=60)",
        ),
        (
            *("P6", GLOO, "GlooProcessGroup._mapped", REPLACE, 'raise PeerLost(f"") from error'),
            GROUP_TEST + "a_killed_peer_is_lost",
            "raise",
        ),
        (
            *("P6", GLOO, "GlooProcessGroup._mapped", DELETE, 'self._end(f"")'),
            GROUP_TEST + "a_rank_that_lost_a_peer_is_lost_to_the_others",
        ),
        (
            *("P7", GLOO, "GlooProcessGroup._end", REPLACE),
            "gloo.recv([torch.empty(1)], peer, ABORT_TAG).wait(dt.timedelta(milliseconds=1))",
            GROUP_TEST + "abort_from_another_thread_unblocks_everybody",
            "gloo.abort()",
        ),
        (
            *("P8", GLOO, "GlooProcessGroup._call", REPLACE, 'raise PeerLost(f"")'),
            GROUP_TEST + "no_call_works_after_the_end",
            "return (yield None, 0.0)",
        ),
        (
            *("P8", GLOO, "GlooProcessGroup.__init__", REPLACE, 'store = rendezvous.store("gloo")'),
            GROUP_TEST + "a_group_without_its_peers_fails_to_build",
            'try: store = rendezvous.store("gloo")\nexcept Exception: return',
        ),
        (
            *("P9", GLOO, "GlooProcessGroup._end", REPLACE, "gloo, self._gloo = self._gloo, None"),
            GROUP_TEST + "close_twice_leaves_no_socket_and_no_thread",
            f"gloo, self._gloo = self._gloo, None; {LEAK}(gloo)",
        ),
        # Transport
        (
            *("T1", RECEIVER, "StreamReceiver._greet", FALSE, "request.schema != self._schema"),
            SHM_TEST + "a_schema_mismatch_fails_at_connect",
        ),
        (
            *("T1", INLINE, "InlineTransport.connect", FALSE, "schema != receiver.schema"),
            INLINE_TEST + "a_schema_mismatch_fails_at_connect",
        ),
        (
            *("T2", HOST_POOL, "HostBuffer.write", REPLACE, "hidden.copy_(sample.hidden_TNH)"),
            SHM_TEST + "memory_may_be_reused_once_the_ticket_is_done",
            "__import__('threading').Timer(0.05, lambda: hidden.copy_(sample.hidden_TNH)).start()",
        ),
        (
            *("T2", INLINE, "InlineReceiver.queue", REPLACE, "ticket: Ticket = Future()"),
            INLINE_TEST + "memory_may_be_reused_once_the_ticket_is_done",
            "ticket: Ticket = Future(); ticket.set_result(None)",
        ),
        (
            *("T3", RECEIVER, "StreamReceiver.receive", REPLACE, "self._arrived.popleft()"),
            SHM_TEST + "samples_arrive_once_in_order_bit_for_bit",
            "self._arrived.pop()",
        ),
        (
            *("T3", INLINE, "InlineReceiver.receive", REPLACE, "self._arrived.popleft()"),
            INLINE_TEST + "samples_arrive_once_in_order_bit_for_bit",
            "self._arrived[0]",
        ),
        (
            *("T4", RECEIVER, "StreamReceiver._read", REPLACE, "self._held[id(sample)] = (sample, arrival)"),
            STAYS,
            "self._held[id(sample)] = (sample, arrival); self._reclaim(arrival.peer.pool, arrival.block)",
        ),
        (
            *("T4", INLINE, "InlineReceiver.release", DELETE, "self._used_bytes -= sample.num_bytes"),
            INLINE_TEST + "a_held_sample_stays_as_it_is",
        ),
        (
            *("T4", WINDOW, "take_held", REPLACE, "return found[1]", STAYS),
            "held[id(sample)] = found; return found[1]",
        ),
        (
            *("T5", RECEIVER, "StreamReceiver._grant_in_order", FALSE),
            "self._used_bytes + size > self._window_bytes",
            WAITS,
        ),
        (
            *("T5", WINDOW, "check_size", FALSE, "sample.num_bytes > window_bytes"),
            SHM_TEST + "a_sample_larger_than_the_window_is_refused_at_once",
        ),
        (
            *("T5", ARENA, "create", REPLACE),
            "_page_up(ADDRESS_WINDOWS * max(window_bytes, mmap.PAGESIZE))",
            SHM_TEST + "a_sample_that_fits_the_window_by_bytes_is_admitted",
            "aligned(window_bytes) + 4 * ALIGNMENT",
        ),
        (
            *("T6", SENDER, "StreamSender._withdrawn_on_error", DELETE),
            "self._send_packet(Packet(PacketKind.WITHDRAW, self._number), time.monotonic())",
            WAITS,
        ),
        (
            *("T6", SENDER, "StreamSender._reserve", OPERAND, "grant.number == self._number"),
            SHM_UNIT + "grant_that_came_too_late_is_not_used",
        ),
        (
            *("T6", RECEIVER, "StreamReceiver.receive", REPLACE, "time.monotonic() + timeout_s"),
            SHM_TEST + "a_receive_that_timed_out_loses_nothing",
            "time.monotonic() + 4 * timeout_s + 4",
        ),
        ("T7", RECEIVER, "StreamReceiver._end", DELETE, "self._arrived.append(_Loss(peer, loss))", KILLED),
        (
            *("T7", RECEIVER, "StreamReceiver._disconnect", DELETE),
            "self._forget(lambda request: request.peer is peer)",
            KILLED,
        ),
        ("T7", RECEIVER, "StreamReceiver._has_changed", OPERAND, "deserted", LAST),
        ("T7", RECEIVER, "StreamReceiver.receive", DELETE, "self._deserted = False", LAST),
        (
            *("T7", RECEIVER, "StreamReceiver._give_up", DELETE, "arrival.peer.channel.shutdown()"),
            SHM_UNIT + "sender_whose_samples_cannot_be_read_is_lost_with_all_of_them[False]",
        ),
        (
            *("T7", INLINE, "InlineReceiver.close", DELETE, 'ticket.set_exception(PeerLost(f""))'),
            INLINE_TEST + "a_closed_receiver_completes_tickets_and_unblocks_senders",
        ),
        (
            *("T8", INLINE, "InlineSender.flush", REPLACE, "list(self._open)"),
            INLINE_TEST + "flush_returns_when_every_ticket_is_done",
            "[]",
        ),
        ("T9", RECEIVER, "StreamReceiver.close", REPLACE, "pool.close()", CLEAN, LEAK + "(pool)"),
        ("T9", SENDER, "StreamSender.close", FALSE, "self._closed", CLEAN),
        # Rendezvous
        (
            *("R1", ADDRESSES, "bind", REPLACE, "listener.bind(where)"),
            RENDEZVOUS_TEST + "rank_0_publishes_the_port_and_listens_on_its_interface_only",
            'listener.bind(("", where[1]))',
        ),
        (
            *("R2", SERVER, "RendezvousServer._objection", FALSE),
            "not same_token(request.token, self._token)",
            TOLD_WHY,
        ),
        (
            *("R3", SERVER, "RendezvousServer._rank_of", FALSE),
            "objection := self._objection(request)",
            TOLD_WHY,
        ),
        (
            *("R4", RENDEZVOUS, "TcpRendezvous._collect", DELETE, "self._compare(frames)"),
            RENDEZVOUS_TEST + "ranks_that_make_different_calls_learn_of_it",
        ),
        (
            *("R5", RENDEZVOUS, "TcpRendezvous._receive", REPLACE, "self._channel.receive(deadline)"),
            RENDEZVOUS_TEST + "the_deadline_names_who_did_not_join",
            "self._channel.receive(deadline + 60)",
        ),
        (
            *("R6", SERVER, "RendezvousServer._forget", DELETE),
            "self._send_to_all(rank, Frame(LOST, 0, rank))",
            RENDEZVOUS_TEST + "a_rank_that_closes_is_lost_to_the_others_after_what_it_took_part_in",
        ),
        (
            *("R7", RENDEZVOUS, "TcpRendezvous.store", REPLACE, "secrets.token_hex(8)"),
            RENDEZVOUS_TEST + "stores_are_namespaces_of_their_own",
            '""',
        ),
        (
            *("R8", RENDEZVOUS, "TcpRendezvous.close", DELETE, "self._server.close()"),
            RENDEZVOUS_TEST + "close_before_anybody_joined_leaves_no_socket_and_no_thread",
        ),
        # Launcher: the part that the library of processes has in the local one
        (
            *("L4", CONTROL, "ControlChannel._beat", DELETE, 'self.send("alive")'),
            LAUNCHER_TEST + "l4_who_computes_is_not_silent",
        ),
        (
            *("L8", REAPER, "main", DELETE, "end_group(group)"),
            LAUNCHER_TEST + "l8_a_killed_launcher_leaves_nothing",
        ),
        # Ranges of a tensor, as a distributed optimizer saves them
        (
            *("S5", SHARDED, "_rectangles", REPLACE, "min(stop, whole * row)"),
            SHARDED_TEST + "any_range_is_a_few_rectangles",
            "whole * row",
        ),
        (
            *("S5", SHARDED, "FlatShard.rectangles", REPLACE),
            "map(sum, zip(self.offset, start, strict=True))",
            SHARDED_TEST + "a_range_of_a_part_is_filled_from_rectangles_of_the_whole",
            "start",
        ),
    ]
]
