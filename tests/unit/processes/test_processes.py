"""The harness of the suites does what the suites rely on."""

import os
import time

import pytest

from spec_testing.processes import Fault, Rank, run_ranks, watch_ranks


class HomeMade(Exception):
    pass


def add(me: Rank, number: int, double: object) -> tuple[int, int, int]:
    assert callable(double)
    return me.rank, double(number), os.getpid()


def double(number: int) -> int:
    return 2 * number


def test_ranks_are_processes_and_functions_of_a_test_module_reach_them():
    values = run_ranks(add, 2, 21, double)
    assert [value[:2] for value in values] == [(0, 42), (1, 42)]
    assert len({os.getpid(), *(pid for _, _, pid in values)}) == 3


def test_ranks_in_process_share_the_tests_process():
    assert run_ranks(add, 2, 21, double, in_process=True) == [(0, 42, os.getpid()), (1, 42, os.getpid())]


def whisper(me: Rank) -> list[object]:
    me.publish(("from", me.rank))
    me.reach("whispered")
    return sorted([me.receive(), me.receive()])


def test_what_a_rank_publishes_reaches_all_others():
    assert run_ranks(whisper, 3) == [
        [("from", 1), ("from", 2)],
        [("from", 0), ("from", 2)],
        [("from", 0), ("from", 1)],
    ]


def fail(me: Rank) -> None:
    if me.rank == 1:
        raise HomeMade("on purpose")


def test_an_error_fails_the_test_with_its_rank_and_trace():
    with pytest.raises(AssertionError, match=r"rank 1 failed:(?s:.)*on purpose") as error:
        run_ranks(fail, 2)
    assert type(error.value.__cause__).__name__ == "HomeMade"


def wait_for_the_failed(me: Rank) -> None:
    fail(me)
    me.receive()


@pytest.mark.parametrize("in_process", [False, True])
def test_a_rank_that_waits_for_a_failed_one_does_not_delay_the_error(in_process):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 failed:(?s:.)*on purpose"):
        run_ranks(wait_for_the_failed, 2, timeout_s=60.0, in_process=in_process)
    assert time.monotonic() - start < 30


def expect_an_error(me: Rank) -> None:
    with pytest.raises(HomeMade):
        pass


def test_an_error_that_did_not_come_fails_the_test_too():
    with pytest.raises(AssertionError, match=r"rank 0 failed:(?s:.)*DID NOT RAISE"):
        run_ranks(expect_an_error, 1)


def vanish(me: Rank) -> None:
    me.reach("the edge")
    os._exit(3)


def test_a_rank_that_dies_unasked_fails_the_test():
    with pytest.raises(AssertionError, match="rank 0 died after 'the edge', exit code 3"):
        watch_ranks(vanish, 1)


def sleep(me: Rank) -> None:
    me.publish(os.getpid())
    me.reach("asleep")
    time.sleep(600)


def test_the_time_limit_names_who_still_runs_and_leaves_nobody():
    with pytest.raises(AssertionError, match=r"after 0.5 s .*0: 'asleep'"):
        watch_ranks(sleep, 1, timeout_s=0.5)


def pid_then_fault(me: Rank) -> int:
    me.publish(os.getpid())
    if me.rank == 1:
        me.reach("fault")
    return me.receive()


@pytest.mark.parametrize("fault", list(Fault))
def test_a_faulty_rank_is_gone_when_the_call_returns(fault):
    outcomes = watch_ranks(pid_then_fault, 2, faults={(1, "fault"): fault})
    assert outcomes[1].value is None
    with pytest.raises(ProcessLookupError):
        os.kill(outcomes[0].value, 0)
