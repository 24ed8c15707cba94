"""Takes away, one at a time, the waits, events and checks of the Ascend transports and group: a rig test must fail.

    python tests/rigs/fake_cann/with_rig.py python tests/rigs/ascend_mutations.py [FILE …]

Each mutation is applied to a temporary copy of the two packages that these are made of. Prints a table; exit code 1
when a mutation survives, 2 when a test fails without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "packages/backend-ascend/src/spec_backend_ascend", ROOT / "packages/kit/src/spec_kit")
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
RELEASED = IPC_TEST + "test_released_memory_is_not_overwritten_before_it_has_been_read[over_the_card]"
REUSED = "test_a_ticket_is_done_when_the_device_has_copied"
FOLLOWS = "test_a_sample_follows_the_work_that_makes_it"
KILLED = "a_killed_sender_is_lost_after_its_last_sample"
HCCL_SUITE = HCCL_TEST + "TestHcclTransport::test_"
SETTLED = IPC_TEST + "test_nothing_is_being_written_once_a_view_is_settled_or_closed"
LINGERS = HCCL_TEST + "test_samples_that_wait_with_a_closed_sender_arrive_as_they_were"
STRIDED = IPC_TEST + "test_a_strided_sample_arrives_as_it_is[over_the_card]"


class Mutation(NamedTuple):
    """``old`` (which occurs once in ``file``, named from its package on) becomes ``new``; then ``test`` must fail."""

    file: str
    old: str
    new: str
    test: str

    def applied(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise ValueError(f"{self.old!r} occurs {source.count(self.old)} times in {self.file}")
        return source.replace(self.old, self.new)


MUTATIONS = [
    # The card's memory
    Mutation(SHARING, "stream.wait_event(self._events.open(info.event))", "pass", RELEASED),
    Mutation(POOL, "self._stream.wait_event(read)", "pass", RELEASED),
    Mutation(POOL, "_own_events[event].record(self._stream)", "pass", RELEASED),
    Mutation(
        SHARING,
        "acl.drain(stream)",
        "pass",
        IPC_TEST + "test_an_event_that_still_lies_in_torch_npus_queue_is_waited_for",
    ),
    Mutation(POOL, "read.record(self._device_module.current_stream(self._sharing.device))", "pass", RELEASED),
    Mutation(SHARING, "self._copied.record(stream)", "pass", IPC_TEST + REUSED + "[over_the_card]"),
    Mutation(ARENA, "if read is not None:", "if False:", RELEASED),
    Mutation(ARENA, "if any(_overlap(piece, other) for other in pieces)", "if False", RELEASED),
    Mutation(SHARING, "ids.contiguous()", "ids", STRIDED),
    Mutation(SHARING, "hidden.contiguous()", "hidden", STRIDED),
    Mutation(
        SHARING,
        "        self._copied.synchronize()\n\n    def close(self)",
        "        pass\n\n    def close(self)",
        SETTLED,
    ),
    Mutation(
        SHARING, "        self.settle()\n        if self._imported", "        if self._imported", SETTLED
    ),
    Mutation(
        POOL,
        "return device_id == self._sharing.device_id",
        "return True",
        IPC_TEST + "test_a_sender_on_another_card_goes_through_the_host",
    ),
    # What a sender announces, and when a ticket is done
    Mutation(
        RECEIVER,
        "if peer.dead and not peer.pool.is_written(block):",
        "if False:",
        HCCL_TEST + "test_a_sample_that_died_with_its_sender_is_not_waited_for",
    ),
    Mutation(
        RECEIVER,
        "        with self._changed:\n            pool = factory.admit(request.device_id, self._has_room)\n",
        "        pool = factory.admit(request.device_id, self._has_room)\n        with self._changed:\n",
        HCCL_TEST + "test_a_sample_is_received_while_another_sender_connects",
    ),
    Mutation(
        SHARING,
        "        self._copied.synchronize()\n\n    def wait_sent(self)",
        "        pass\n\n    def wait_sent(self)",
        IPC_TEST + FOLLOWS + "[over_the_card]",
    ),
    Mutation(
        HCCL_POOL,
        "while self._buffer.num_taken < self._number or not self._sent.query():",
        "while False:",
        HCCL_SUITE + KILLED,
    ),
    Mutation(
        HCCL_POOL,
        "self._sent.synchronize()",
        "pass",
        HCCL_TEST + "test_a_transfer_that_fails_fails_its_ticket_and_no_later_sender",
    ),
    Mutation(
        HCCL_POOL,
        "self._abandoned.set()",
        "pass",
        HCCL_SUITE + "a_closed_receiver_completes_tickets_and_unblocks_senders",
    ),
    Mutation(
        SENDER,
        "late = wait(list(self._open_tickets), max(0.0, deadline - time.monotonic())).not_done",
        "late = ()",
        HCCL_SUITE + "flush_returns_when_every_ticket_is_done",
    ),
    Mutation(
        SENDER,
        "            announcing.join(CLOSE_S)\n            if announcing.is_alive():\n"
        "                self._buffer.abandon()\n                announcing.join(CLOSE_S)\n",
        "",
        IPC_TEST + "test_close_lets_a_copy_come_to_its_end",
    ),
    Mutation(
        SENDER,
        "                thread.join(SETTLE_S)\n",
        "                pass\n",
        HCCL_TEST + "test_close_settles_the_tickets_of_what_was_taken",
    ),
    # HCCL between cards
    Mutation(HCCL_POOL, "self._stream.wait_event(copied)", "pass", HCCL_TEST + FOLLOWS),
    Mutation(HCCL_POOL, "copied.record(torch.npu.current_stream(self._device))", "pass", HCCL_TEST + FOLLOWS),
    Mutation(HCCL_POOL, "copied, staged\n", "copied, staged[:0].clone()\n", LINGERS),
    Mutation(HCCL_POOL, "sent.record(self._stream)", "pass", LINGERS),
    Mutation(SENDER, "if any(thread.is_alive() for thread in self._threads[2:]):", "if False:", LINGERS),
    Mutation(SENDER, "completing.join(LINGER_S)\n        self._buffer", "self._buffer", LINGERS),
    Mutation(HCCL_POOL, "self._buffer.num_taken < self._number or ", "", HCCL_SUITE + KILLED),
    Mutation(
        HCCL_POOL,
        " or not self._sent.query()",
        "",
        HCCL_TEST + "test_a_ticket_ends_with_its_receiver_whatever_the_device_does",
    ),
    Mutation(
        HCCL_POOL,
        "self._stream.synchronize()",
        "pass",
        HCCL_TEST + "test_a_transfer_that_fails_fails_its_ticket_and_no_later_sender",
    ),
    Mutation(
        HCCL_POOL,
        "return not block.num_tokens",
        "return True",
        HCCL_TEST + "test_a_sample_that_died_with_its_sender_is_not_waited_for",
    ),
    Mutation(
        HCCL_POOL,
        "        communicator.check()\n",
        "",
        HCCL_TEST + "test_what_hccl_notices_later_fails_the_next_receive",
    ),
    Mutation(
        HCCL_POOL,
        " and card != own",
        "",
        HCCL_TEST + "test_two_ends_on_one_card_go_through_the_host",
    ),
    # The group
    Mutation(
        GROUP,
        "if tensor.device != self.device or not tensor.is_contiguous():",
        "if tensor.device != self.device:",
        SUITE_TEST + "a_tensor_that_cannot_travel_is_refused_before_anything_is_sent",
    ),
    Mutation(
        GROUP,
        "if tensor.device != self.device or not tensor.is_contiguous():",
        "if not tensor.is_contiguous():",
        SUITE_TEST + "a_tensor_that_cannot_travel_is_refused_before_anything_is_sent",
    ),
    Mutation(
        GROUP,
        "if tensor.dtype not in self.summable:",
        "if False:",
        SUITE_TEST + "all_reduce_refuses_what_it_cannot_sum",
    ),
    Mutation(
        AGREED,
        "                    self._agree_with_all(hosts, name, size)\n",
        "                    pass\n",
        SUITE_TEST + "a_killed_peer_is_lost",
    ),
    Mutation(
        AGREED,
        "            communicator.check()\n        except",
        "            pass\n        except",
        GROUP_TEST + "test_what_hccl_notices_later_ends_the_group",
    ),
    Mutation(AGREED, "self._queued.record()", "pass", GROUP_TEST + "test_close_lets_what_was_issued_arrive"),
    Mutation(
        AGREED,
        "while self._is_busy() and",
        "while False and",
        GROUP_TEST + "test_close_lets_what_was_issued_arrive",
    ),
    Mutation(
        HCCL_GROUP,
        "            total = value.item()\n",
        "            total = self.world_size\n",
        GROUP_TEST + "test_a_group_that_cannot_work_fails_to_build",
    ),
    Mutation(
        AGREED,
        "        self._refuse_shared_devices(rendezvous)\n",
        "",
        GROUP_TEST + "test_two_ranks_on_one_card_are_refused",
    ),
    Mutation(
        HCCL_GROUP,
        "        self.all_reduce(value)\n",
        "        value *= self.world_size\n",
        GROUP_TEST + "test_a_group_that_cannot_work_fails_to_build",
    ),
    Mutation(
        AGREED,
        "            self._hosts.abort()\n",
        "            pass\n",
        SUITE_TEST + "abort_from_another_thread_unblocks_everybody",
    ),
    Mutation(
        AGREED,
        "            if not torch.equal(mine, theirs):",
        "            if False:",
        GROUP_TEST + "test_ranks_that_make_different_calls_learn_of_it_before_anything_is_sent",
    ),
    # HCCL's rules
    Mutation(
        HCCL,
        '    with ISSUE:\n        _call("HcclGetRootInfo"',
        '    if True:\n        _call("HcclGetRootInfo"',
        BINDING_TEST + "test_root_infos_are_made_one_after_the_other",
    ),
    Mutation(
        HCCL,
        '            with ISSUE:\n                _call("HcclCommDestroy"',
        '            if True:\n                _call("HcclCommDestroy"',
        BINDING_TEST + "test_a_communicator_is_not_destroyed_while_another_thread_issues",
    ),
    Mutation(
        HCCL,
        '        with ISSUE:\n            _call("HcclCommInitRootInfo"',
        '        if True:\n            _call("HcclCommInitRootInfo"',
        BINDING_TEST + "test_communicators_are_made_one_after_the_other",
    ),
    Mutation(
        HCCL,
        "        with ISSUE:\n            _call(name,",
        "        if True:\n            _call(name,",
        BINDING_TEST + "test_calls_of_several_threads_are_issued_one_after_the_other",
    ),
]


def survives(mutation: Mutation, sources: Path) -> bool:
    """Whether the test passes although the mutation is in place."""
    target = sources / mutation.file
    original = target.read_text(encoding="utf-8")
    target.write_text(mutation.applied(original), encoding="utf-8")
    try:
        return not failure([mutation.test], sources)
    finally:
        target.write_text(original, encoding="utf-8")


def failure(tests: list[str], sources: Path) -> str:
    """Return pytest's output when a test fails; empty when all pass."""
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(sources)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=90", *tests]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return run.stdout[-4000:] if run.returncode else ""


def main(files: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not files or Path(mutation.file).name in files]
    if not chosen:
        print(
            f"no mutation of {', '.join(files)}; there are some of",
            *sorted({Path(m.file).name for m in MUTATIONS}),
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        for package in PACKAGES:
            shutil.copytree(package, sources / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        if output := failure(sorted({mutation.test for mutation in chosen}), sources):
            print(f"without a mutation, too, a test fails:\n{output}")
            return 2
        survivors = 0
        for mutation in chosen:
            survived = survives(mutation, sources)
            survivors += survived
            line = mutation.old.strip().splitlines()[0][:60]
            verdict = "SURVIVED" if survived else "caught"
            print(
                f"{verdict:8}  {mutation.file.split('/')[-1]:26}  {line:60}  {mutation.test.split('::')[-1]}",
                flush=True,
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
