"""Takes away, one at a time, the lines that keep a clause of a contract, and checks that the clause's test fails.

    python tests/mutations/run.py [CLAUSE …]        # e.g. P6 T4; all of them without arguments

Each mutation is applied to a temporary copy of the package; the sources stay as they are. Prints a table; exit
code 1 when a mutation survives, 2 when a test fails without it. ``test_table.py`` keeps the table fit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    name: ROOT / f"packages/{name.removeprefix('spec_')}/src" for name in ("spec_processes", "spec_kit")
}
"""Folder of each package that is mutated."""

GLOO, GROUP = "spec_kit/collectives/gloo_process_group.py", "spec_kit/collectives/library_process_group.py"
SENDER, RECEIVER, WINDOW = (f"spec_kit/streams/{name}.py" for name in ("sender", "receiver", "window"))
INLINE, HOST_POOL, ARENA = (
    f"spec_kit/streams/{name}.py" for name in ("inline_transport", "host_pool", "shared_memory")
)
ADDRESSES = "spec_processes/sockets/addresses.py"
RENDEZVOUS, SERVER = (f"spec_processes/sockets/{name}.py" for name in ("rendezvous", "rendezvous_server"))
SHARDED = "spec_kit/sharding/sharded_state.py"
CONTROL, REAPER = "spec_processes/control.py", "spec_processes/reaper.py"

GROUP_TEST = "tests/contract/test_cpu_process_group.py::TestGlooProcessGroup::test_"
SHM_TEST = "tests/contract/test_cpu_transports.py::TestSharedMemoryTransport::test_"
INLINE_TEST = "tests/contract/test_cpu_transports.py::TestInlineTransport::test_"
RENDEZVOUS_TEST = "tests/unit/processes/sockets/test_rendezvous.py::test_"
UPDATES, PUSH, PUBLISHER = (f"spec_kit/weight_sync/{name}.py" for name in ("receiver", "push", "publisher"))
UPDATE_TEST = "tests/unit/kit/weight_sync/test_receiver.py::test_"
PUBLISHER_TEST = "tests/unit/kit/weight_sync/test_publisher.py::test_"
KEPT_TEST = PUBLISHER_TEST + "what_transports_keep_is_released_with_a_replica_a_publisher_and_a_receiver"
WEIGHTS_TEST = "tests/contract/test_weight_transports.py::TestFileTransport::test_"
SHARDED_TEST = "tests/unit/kit/sharding/test_sharded_state.py::test_"
LAUNCHER_TEST = "tests/contract/test_local_launcher.py::TestLocalLauncher::test_"


@dataclass(frozen=True)
class Mutation:
    """``old`` (which occurs once in ``file``) becomes ``new``; then ``test`` must fail."""

    clause: str
    file: str
    old: str
    new: str
    test: str

    def applied(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.clause}: {self.old!r} occurs {source.count(self.old)} times in {self.file}"
            )
        mutated = source.replace(self.old, self.new)
        return mutated + "KEPT: list[object] = []\n" if "KEPT" in self.new else mutated


MUTATIONS = [
    # Draft replica
    Mutation(
        "U3",
        UPDATES,
        'if not self._is(update, "received"):',
        "if False:",
        UPDATE_TEST + "update_that_was_not_received_can_be_neither_committed_nor_reverted[commit]",
    ),
    Mutation(
        "U3",
        PUSH,
        'if delivery.state == "received"]',
        "]",
        PUBLISHER_TEST + "each_of_three_commits_for_itself[load-aborted]",
    ),
    Mutation(
        "U10",
        PUSH,
        "if self.version_is_taken:",
        "if False:",
        PUBLISHER_TEST + "version_that_is_taken_at_one_replica_is_committed_at_none",
    ),
    Mutation(
        "U6",
        UPDATES,
        "if last is not None and update.fence < last.fence:",
        "if False:",
        UPDATE_TEST + "order_is_refused",
    ),
    Mutation(
        "U6",
        UPDATES,
        "if last is not None and update.precedence <= last.precedence:",
        "if False:",
        UPDATE_TEST + "order_is_refused",
    ),
    Mutation(
        "U10",
        UPDATES,
        "self._owner.check_version(self.manifest)",
        "pass",
        UPDATE_TEST + "version_names_one_draft_for_good",
    ),
    Mutation(
        "U10",
        UPDATES,
        "if problem := finite.problem():",
        "if (problem := finite.problem()) and False:",
        UPDATE_TEST + "what_arrives_with_nan_or_infinity_is_not_committed[nan]",
    ),
    Mutation(
        "U7",
        UPDATES,
        "self._owner.give_up(update, cause(error))",
        "pass",
        UPDATE_TEST + "publisher_that_is_not_there_ends_in_the_status",
    ),
    Mutation(
        "U7",
        UPDATES,
        "if digest != expected_digests[name]:",
        "if False:",
        WEIGHTS_TEST + "damage_is_never_served",
    ),
    Mutation(
        "U7", UPDATES, "        if missing:", "        if False:", WEIGHTS_TEST + "damage_is_never_served"
    ),
    # Weight transport
    Mutation("W7", PUBLISHER, "transport.forget(name)", "pass", KEPT_TEST),
    Mutation("W7", PUBLISHER, "transport.close()", "pass", KEPT_TEST),
    Mutation("W7", UPDATES, "transport.close()", "pass", KEPT_TEST),
    # Process group
    Mutation(
        "P1",
        GROUP,
        "return tensor.view(-1).view(torch.uint8)",
        "return tensor.view(-1)",
        GROUP_TEST + "every_dtype_and_shape_arrives_bit_for_bit",
    ),
    Mutation(
        "P1",
        GLOO,
        "options.rootRank, options.rootTensor = src, 0",
        "options.rootRank, options.rootTensor = 0, 0",
        GROUP_TEST + "every_dtype_and_shape_arrives_bit_for_bit[broadcast]",
    ),
    Mutation(
        "P2",
        GLOO,
        "self._gloo.allreduce([tensor]).wait()",
        "self._gloo.allreduce([tensor.clone()]).wait()",
        GROUP_TEST + "all_reduce_sums_in_place",
    ),
    Mutation(
        "P2",
        GROUP,
        "if tensor.dtype not in self.summable:",
        "if False:",
        GROUP_TEST + "all_reduce_refuses_what_it_cannot_sum",
    ),
    Mutation(
        "P3",
        GLOO,
        "self._gloo.allreduce([tensor]).wait()",
        "KEPT.append(self._gloo.allreduce([tensor]))",
        GROUP_TEST + "calls_follow_the_work_before_and_precede_the_work_after",
    ),
    Mutation(
        "P4",
        GROUP,
        "if tensor.device != self.device or not tensor.is_contiguous():",
        "if tensor.device != self.device:",
        GROUP_TEST + "a_tensor_that_cannot_travel_is_refused_before_anything_is_sent",
    ),
    Mutation(
        "P4",
        GROUP,
        "if tensor.device != self.device or not tensor.is_contiguous():",
        "if not tensor.is_contiguous():",
        GROUP_TEST + "a_tensor_that_cannot_travel_is_refused_before_anything_is_sent",
    ),
    Mutation(
        "P5",
        GLOO,
        'store = rendezvous.store("gloo")',
        'store = rendezvous.store("gloo")\n'
        '        torch.distributed.init_process_group("gloo", store=store, rank=self.rank, '
        "world_size=self.world_size)",
        GROUP_TEST + "the_default_group_is_neither_needed_nor_touched",
    ),
    Mutation(
        "P6",
        GLOO,
        "options._timeout = dt.timedelta(seconds=timeout_s)",
        "options._timeout = dt.timedelta(seconds=60)",
        GROUP_TEST + "a_stopped_peer_exceeds_the_deadline",
    ),
    Mutation(
        "P6",
        GLOO,
        '            raise PeerLost(f"{where}: {error}") from error',
        "            raise",
        GROUP_TEST + "a_killed_peer_is_lost",
    ),
    Mutation(
        "P6",
        GLOO,
        '            self._end(f"{where} failed")  # so that the peers that wait for this rank learn of it, too\n',
        "",
        GROUP_TEST + "a_rank_that_lost_a_peer_is_lost_to_the_others",
    ),
    Mutation(
        "P7",
        GLOO,
        "gloo.recv([torch.empty(1)], peer, ABORT_TAG).wait(dt.timedelta(milliseconds=1))",
        "gloo.abort()",
        GROUP_TEST + "abort_from_another_thread_unblocks_everybody",
    ),
    Mutation(
        "P8",
        GLOO,
        "        if gloo is None:\n            raise PeerLost(",
        "        if gloo is None:\n            yield None, 0.0\n            return\n            raise PeerLost(",
        GROUP_TEST + "no_call_works_after_the_end",
    ),
    Mutation(
        "P8",
        GLOO,
        '        store = rendezvous.store("gloo")\n',
        '        try:\n            store = rendezvous.store("gloo")\n        except Exception:\n            return\n',
        GROUP_TEST + "a_group_without_its_peers_fails_to_build",
    ),
    Mutation(
        "P9",
        GLOO,
        "        gloo, self._gloo = self._gloo, None\n",
        "        gloo, self._gloo = self._gloo, None\n        KEPT.append(gloo)\n",
        GROUP_TEST + "close_twice_leaves_no_socket_and_no_thread",
    ),
    # Transport
    Mutation(
        "T1",
        RECEIVER,
        "        if request.schema != self._schema:\n",
        "        if False:\n",
        SHM_TEST + "a_schema_mismatch_fails_at_connect",
    ),
    Mutation(
        "T1",
        INLINE,
        "        if schema != receiver.schema:\n",
        "        if False:\n",
        INLINE_TEST + "a_schema_mismatch_fails_at_connect",
    ),
    Mutation(
        "T2",
        HOST_POOL,
        "        hidden.copy_(sample.hidden_TNH)\n",
        "        import threading\n"
        "        threading.Timer(0.05, lambda: hidden.copy_(sample.hidden_TNH)).start()\n",
        SHM_TEST + "memory_may_be_reused_once_the_ticket_is_done",
    ),
    Mutation(
        "T2",
        INLINE,
        "            ticket: Ticket = Future()\n",
        "            ticket: Ticket = Future()\n            ticket.set_result(None)\n",
        INLINE_TEST + "memory_may_be_reused_once_the_ticket_is_done",
    ),
    Mutation(
        "T3",
        RECEIVER,
        "arrival = self._arrived.popleft()",
        "arrival = self._arrived.pop()",
        SHM_TEST + "samples_arrive_once_in_order_bit_for_bit",
    ),
    Mutation(
        "T3",
        INLINE,
        "sample, ticket = self._arrived.popleft()",
        "sample, ticket = self._arrived[0]",
        INLINE_TEST + "samples_arrive_once_in_order_bit_for_bit",
    ),
    Mutation(
        "T4",
        RECEIVER,
        "        self._held[id(sample)] = (sample, arrival)\n",
        "        self._held[id(sample)] = (sample, arrival)\n"
        "        self._reclaim(arrival.peer.pool, arrival.block)\n",
        SHM_TEST + "a_held_sample_stays_as_it_is",
    ),
    Mutation(
        "T4",
        INLINE,
        "            self._used_bytes -= sample.num_bytes\n",
        "",
        INLINE_TEST + "a_held_sample_stays_as_it_is",
    ),
    Mutation(
        "T4",
        WINDOW,
        "    return found[1]\n",
        "    held[id(sample)] = found\n    return found[1]\n",
        SHM_TEST + "a_held_sample_stays_as_it_is",
    ),
    Mutation(
        "T5",
        RECEIVER,
        "            if self._used_bytes + size > self._window_bytes:\n                return\n",
        "",
        SHM_TEST + "a_send_beyond_the_window_waits_for_a_release",
    ),
    Mutation(
        "T5",
        WINDOW,
        "    if sample.num_bytes > window_bytes:\n",
        "    if False:\n",
        SHM_TEST + "a_sample_larger_than_the_window_is_refused_at_once",
    ),
    Mutation(
        "T5",
        ARENA,
        "size = _page_up(ADDRESS_WINDOWS * max(window_bytes, mmap.PAGESIZE))",
        "size = aligned(window_bytes) + 4 * ALIGNMENT",
        SHM_TEST + "a_sample_that_fits_the_window_by_bytes_is_admitted",
    ),
    Mutation(
        "T6",
        SENDER,
        "                self._send_packet(Packet(PacketKind.WITHDRAW, self._number), time.monotonic())\n",
        "                pass\n",
        SHM_TEST + "a_send_beyond_the_window_waits_for_a_release",
    ),
    Mutation(
        "T6",
        SENDER,
        "            if grant.kind is PacketKind.GRANT and grant.number == self._number:\n",
        "            if grant.kind is PacketKind.GRANT:\n",
        "tests/unit/kit/streams/test_shared_memory_transport.py::test_a_grant_that_came_too_late_is_not_used",
    ),
    Mutation(
        "T6",
        RECEIVER,
        "        deadline = time.monotonic() + timeout_s\n",
        "        deadline = time.monotonic() + 4 * timeout_s + 4\n",
        SHM_TEST + "a_receive_that_timed_out_loses_nothing",
    ),
    Mutation(
        "T7",
        RECEIVER,
        "                self._arrived.append(_Loss(peer, loss))\n",
        "                pass\n",
        SHM_TEST + "a_sender_killed_while_it_waits_leaves_room_for_the_others",
    ),
    Mutation(
        "T7",
        RECEIVER,
        "        self._forget(lambda request: request.peer is peer)\n",
        "",
        SHM_TEST + "a_sender_killed_while_it_waits_leaves_room_for_the_others",
    ),
    Mutation(
        "T7",
        RECEIVER,
        "return self._closed or bool(self._arrived) or deserted",
        "return self._closed or bool(self._arrived)",
        SHM_TEST + "a_closed_sender_is_lost_after_its_last_sample",
    ),
    Mutation(
        "T7",
        RECEIVER,
        "                    self._deserted = False\n",
        "",
        SHM_TEST + "a_closed_sender_is_lost_after_its_last_sample",
    ),
    Mutation(
        "T7",
        RECEIVER,
        "        arrival.peer.channel.shutdown()\n",
        "",
        "tests/unit/kit/streams/test_shared_memory_transport.py::"
        "test_a_sender_whose_samples_cannot_be_read_is_lost_with_all_of_them[False]",
    ),
    Mutation(
        "T7",
        INLINE,
        '            ticket.set_exception(PeerLost(f"the receiver at {self._address} was closed"))\n',
        "            pass\n",
        INLINE_TEST + "a_closed_receiver_completes_tickets_and_unblocks_senders",
    ),
    Mutation(
        "T8",
        INLINE,
        "if late := wait(list(self._open), timeout_s).not_done:",
        "if late := wait([], timeout_s).not_done:",
        INLINE_TEST + "flush_returns_when_every_ticket_is_done",
    ),
    Mutation(
        "T9",
        RECEIVER,
        "            pool.close()\n",
        "            KEPT.append(pool)\n",
        SHM_TEST + "close_twice_leaves_nothing_behind",
    ),
    Mutation(
        "T9",
        SENDER,
        "        if self._closed:\n            return\n        self._closed = True\n",
        "        self._closed = True\n",
        SHM_TEST + "close_twice_leaves_nothing_behind",
    ),
    # Rendezvous
    Mutation(
        "R1",
        ADDRESSES,
        "        listener.bind(where)\n",
        '        listener.bind(("", where[1]))\n',
        RENDEZVOUS_TEST + "rank_0_publishes_the_port_and_listens_on_its_interface_only",
    ),
    Mutation(
        "R2",
        SERVER,
        "        if not same_token(request.token, self._token):\n",
        "        if False:\n",
        RENDEZVOUS_TEST + "who_does_not_belong_is_told_why",
    ),
    Mutation(
        "R3",
        SERVER,
        "        if objection := self._objection(request):\n",
        '        if objection := "":\n',
        RENDEZVOUS_TEST + "who_does_not_belong_is_told_why",
    ),
    Mutation(
        "R4",
        RENDEZVOUS,
        "            self._compare(frames)\n",
        "",
        RENDEZVOUS_TEST + "ranks_that_make_different_calls_learn_of_it",
    ),
    Mutation(
        "R5",
        RENDEZVOUS,
        "self._channel.receive(deadline)",
        "self._channel.receive(deadline + 60)",
        RENDEZVOUS_TEST + "the_deadline_names_who_did_not_join",
    ),
    Mutation(
        "R6",
        SERVER,
        "                self._send_to_all(rank, Frame(LOST, 0, rank))\n",
        "                pass\n",
        RENDEZVOUS_TEST + "a_rank_that_closes_is_lost_to_the_others_after_what_it_took_part_in",
    ),
    Mutation(
        "R7",
        RENDEZVOUS,
        "        mine = [*_store_file(), secrets.token_hex(8)] if self.rank == 0 else []\n",
        '        mine = [*_store_file(), ""] if self.rank == 0 else []\n',
        RENDEZVOUS_TEST + "stores_are_namespaces_of_their_own",
    ),
    Mutation(
        "R8",
        RENDEZVOUS,
        "            self._server.close()\n",
        "            pass\n",
        RENDEZVOUS_TEST + "close_before_anybody_joined_leaves_no_socket_and_no_thread",
    ),
    # Launcher: the part that core's library has in the local one
    Mutation(
        "L4",
        CONTROL,
        'self.send("alive")',
        "pass",
        LAUNCHER_TEST + "l4_who_computes_is_not_silent",
    ),
    Mutation(
        "L8",
        REAPER,
        "        end_group(group)\n",
        "        pass\n",
        LAUNCHER_TEST + "l8_a_killed_launcher_leaves_nothing",
    ),
    # Ranges of a tensor, as a distributed optimizer saves them
    Mutation(
        "S5",
        SHARDED,
        "end = min(stop, whole * row)",
        "end = whole * row",
        SHARDED_TEST + "any_range_is_a_few_rectangles",
    ),
    Mutation(
        "S5",
        SHARDED,
        "map(sum, zip(self.offset, start, strict=True))",
        "start",
        SHARDED_TEST + "a_range_of_a_part_is_filled_from_rectangles_of_the_whole",
    ),
]


def survives(mutation: Mutation, sources: Path) -> bool:
    """Whether the clause's test passes although the mutation is in place."""
    target = sources / mutation.file
    original = target.read_text(encoding="utf-8")
    target.write_text(mutation.applied(original), encoding="utf-8")
    try:
        return not failure([mutation.test], sources)
    finally:
        target.write_text(original, encoding="utf-8")


def failure(tests: list[str], sources: Path) -> str:
    """Return pytest's output when a test fails; empty when all pass."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=60", *tests]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return run.stdout[-4000:] if run.returncode else ""


def main(clauses: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not clauses or mutation.clause in clauses]
    if not chosen:
        print(
            f"no mutation of {', '.join(clauses)}; there are some of", *sorted({m.clause for m in MUTATIONS})
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        for name, folder in PACKAGES.items():
            shutil.copytree(folder / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        if output := failure(sorted({mutation.test for mutation in chosen}), sources):
            print(f"without a mutation, too, a test fails:\n{output}")
            return 2
        survivors = 0
        for mutation in chosen:
            survived = survives(mutation, sources)
            survivors += survived
            verdict = "SURVIVED" if survived else "caught"
            line = mutation.old.strip().splitlines()[0][:56]
            print(
                f"{mutation.clause}  {verdict:8}  {mutation.file:32}  {line:56}  {mutation.test.split('::')[-1]}",
                flush=True,
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
