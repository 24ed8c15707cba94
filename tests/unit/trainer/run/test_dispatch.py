"""The dispatcher: admission in the order of the schedule inside the window, whatever the engines do."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.unit.trainer.run.slow_engine import SCHEMA, TOKEN, SlowEngine, dispatcher

from spec_core.errors import ConfigError, EngineError
from spec_core.records import CaptureRequest
from spec_trainer.run.dispatch import SampleReference, capture_from, check_sizes, sample_bytes


def never(error: BaseException) -> None:
    raise AssertionError(error)


def started(schedule, **settings):
    """A dispatcher that has begun an epoch with one engine, and the engine."""
    engine = SlowEngine()
    sent = dispatcher(schedule, [engine], **settings)
    sent.start(schedule.items(0), never)
    return sent, engine


def test_sample_bytes():
    assert sample_bytes(SCHEMA, 3) == 3 * TOKEN


def test_the_tokens_of_samples_are_read_from_the_dataset(make_schedule):
    asked = []

    class Engine:
        def capture(self, requests, schema):
            asked.append((requests, schema))
            return Future()

    samples = [SampleReference(70, 1, ("a",)), SampleReference(71, 0, ("b",))]
    capture_from(make_schedule([4, 6]).dataset, Engine(), SCHEMA, samples)
    wanted = [
        CaptureRequest(request_id=70, input_ids=(100, 101, 102, 103, 104, 105), destinations=("a",)),
        CaptureRequest(request_id=71, input_ids=(0, 1, 2, 3), destinations=("b",)),
    ]
    assert asked == [(wanted, SCHEMA)]


def test_references_carry_ids_and_destination(make_schedule):
    schedule = make_schedule([4, 6], ranks=2, capture_tokens=6)
    seen = []

    class Recorder(SlowEngine):
        def capture(self, requests):
            seen.extend(requests)
            return super().capture(requests)

    engine = Recorder()
    dispatcher(schedule, [engine], 100, ranks=2).start(schedule.items(0), never)
    (item,) = schedule.items(0)
    assert {sample.request_id: sample.sample_id for sample in seen} == {
        schedule.request_id(item, 0): 0,
        schedule.request_id(item, 1): 1,
    }
    ranks = schedule.destinations(item)
    assert {sample.destinations for sample in seen} == {("rank-0",), ("rank-1",)}
    for sample in seen:
        assert sample.destinations == tuple(f"rank-{rank}" for rank in ranks[sample.sample_id])


def test_a_sample_takes_room_at_each_of_its_destinations(make_schedule):
    schedule = make_schedule([4, 4, 4], global_batch_tokens=4, data_parallel_ranks=(0, 0))
    sent, engine = started(schedule, window_tokens=4, ranks=2)
    (first,) = engine.asked[0]
    engine.finish()
    sent.released(0, first)
    assert len(engine.asked) == 1
    sent.released(1, first)
    assert len(engine.asked) == 2


def test_samples_are_admitted_in_order_and_never_beyond_the_window(make_schedule):
    schedule = make_schedule([5] * 12, global_batch_tokens=10, capture_tokens=5)
    sent, engine = started(schedule, window_tokens=12)
    released = 0
    expected = [schedule.request_id(item, sample) for item in schedule.items(0) for sample in item.sample_ids]
    for _ in range(100):
        taken = sum(map(len, engine.asked))
        assert 5 * (taken - released) <= 12
        if released == 12:
            break
        if engine.running:
            engine.finish()
        if released < sum(map(len, engine.asked)) - len(engine.running):
            sent.released(0, expected[released])
            released += 1
    assert [sample for batch in engine.asked for sample in batch] == expected


def test_finished_captures_do_not_free_the_window_only_releases_do(make_schedule):
    schedule = make_schedule([5] * 4, global_batch_tokens=20, capture_tokens=5)
    sent, engine = started(schedule, window_tokens=10)
    engine.finish()
    engine.finish()
    assert len(engine.asked) == 2
    sent.released(0, engine.asked[0][0])
    assert len(engine.asked) == 3


def test_a_batch_larger_than_the_window_is_cut(make_schedule):
    schedule = make_schedule([5, 5, 5], capture_tokens=100)
    sent, engine = started(schedule, window_tokens=12)
    assert [len(batch) for batch in engine.asked] == [2]
    engine.finish()
    sent.released(0, engine.asked[0][0])
    assert [len(batch) for batch in engine.asked] == [2, 1]


def test_windows_of_the_ranks_are_their_own(make_schedule):
    """Rank 0 has released nothing; rank 1's samples wait behind rank 0's, as the schedule orders them."""
    schedule = make_schedule([5] * 8, global_batch_tokens=10, capture_tokens=5, ranks=2)
    sent, engine = started(schedule, window_tokens=10, ranks=2)
    for _ in range(4):
        if engine.running:
            engine.finish()
    assert len(engine.asked) == 4
    for request in engine.requests_for("rank-1"):
        sent.released(1, request)
    assert len(engine.asked) == 4
    sent.released(0, engine.requests_for("rank-0")[0])
    assert len(engine.asked) == 6


def test_a_slow_engine_does_not_hold_up_a_fast_one(make_schedule):
    schedule = make_schedule([5] * 20, global_batch_tokens=5, capture_tokens=5)
    slow, fast = SlowEngine(), SlowEngine()
    dispatcher(schedule, [slow, fast], window_tokens=1000).start(schedule.items(0), never)
    for _ in range(40):
        if fast.running:
            fast.finish()
    assert len(slow.asked) == 2
    assert len(fast.asked) == 18
    samples = [sample for batch in slow.asked + fast.asked for sample in batch]
    assert len(samples) == len(set(samples)) == 20


@pytest.mark.parametrize(
    ("engines", "slow", "capture_tokens"), [(1, 1, 10), (3, 10, 10), (7, 10, 25), (2, 1, 5)]
)
def test_number_and_speed_of_engines_change_nothing_of_what_goes_where(
    make_schedule, engines, slow, capture_tokens
):
    """The last engine answers once while the others answer ``slow`` times."""
    settings = {
        "global_batch_tokens": 40,
        "capture_tokens": capture_tokens,
        "ranks": 3,
        "shuffle": True,
        "epochs": 2,
    }
    schedule = make_schedule([2, 3, 5, 4, 1] * 20, **settings)
    found: dict[int, SampleReference] = {}

    class Recorder(SlowEngine):
        def capture(self, requests):
            assert not found.keys() & {request.request_id for request in requests}
            found.update({request.request_id: request for request in requests})
            return super().capture(requests)

    several = [Recorder() for _ in range(engines)]
    dispatcher(schedule, several, window_tokens=10**6, ranks=3).start(schedule.items(0), never)
    turns = [*several[:-1] * slow, several[-1]]
    while any(engine.running for engine in several):
        for engine in turns:
            if engine.running:
                engine.finish()
    assert found == {
        request: SampleReference(request, sample_id, tuple(f"rank-{rank}" for rank in ranks))
        for item in schedule.items(0)
        for sample_id, ranks in schedule.destinations(item).items()
        for request in [schedule.request_id(item, sample_id)]
    }


def test_the_first_failure_is_told_once_and_stops_everything(make_schedule):
    schedule = make_schedule([5] * 20, global_batch_tokens=5, capture_tokens=5)
    one, other = SlowEngine(), SlowEngine()
    told: list[BaseException] = []
    dispatcher(schedule, [one, other], window_tokens=1000).start(schedule.items(0), told.append)
    first, second = EngineError("first"), EngineError("second")
    one.running.pop(0).set_exception(first)
    one.running.pop(0).set_exception(second)
    other.finish()
    other.finish()
    assert told == [first]
    assert len(one.asked + other.asked) == 4


def test_an_engine_that_refuses_at_once_fails_like_one_that_refuses_later(make_schedule):
    class Closed:
        def capture(self, requests):
            raise EngineError("the engine is closed")

    schedule = make_schedule([5] * 4)
    told: list[BaseException] = []
    dispatcher(schedule, [Closed()], window_tokens=1000).start(schedule.items(0), told.append)
    assert [str(error) for error in told] == ["the engine is closed"]


def test_stopped_it_dispatches_nothing_more(make_schedule):
    schedule = make_schedule([5] * 8, global_batch_tokens=5, capture_tokens=5)
    sent, engine = started(schedule, window_tokens=1000)
    sent.stop()
    engine.finish()
    sent.released(0, engine.asked[0][0])
    assert len(engine.asked) == 2


def test_engines_may_answer_from_many_threads(make_schedule):
    schedule = make_schedule([5] * 300, global_batch_tokens=25, capture_tokens=10, ranks=2)
    captured: list[int] = []
    with ThreadPoolExecutor(4) as pool:

        class Threaded:
            def capture(self, requests):
                return pool.submit(self._capture, requests)

            def _capture(self, requests):
                captured.extend(request.request_id for request in requests)
                for request in requests:
                    sent.released(int(request.destinations[0][-1]), request.request_id)

        sent = dispatcher(schedule, [Threaded(), Threaded()], window_tokens=15, ranks=2)
        sent.start(schedule.items(0), never)
        while len(captured) < 300:
            time.sleep(0.001)
    assert len(set(captured)) == 300


def test_sizes_that_cannot_work_are_refused_with_the_number_that_does(make_schedule):
    schedule = make_schedule([5, 9], capture_tokens=9)
    check_sizes(schedule, SCHEMA, 9 * TOKEN)
    with pytest.raises(
        ConfigError, match=rf"placement.window_bytes={9 * TOKEN - 1} .* raise it to {9 * TOKEN} "
    ):
        check_sizes(schedule, SCHEMA, 9 * TOKEN - 1)
    with pytest.raises(
        ConfigError, match=r"engine.batch_tokens=8 is smaller than sample 1 .* raise it to 9 "
    ):
        check_sizes(make_schedule([5, 9], capture_tokens=8), SCHEMA, 100 * TOKEN)
