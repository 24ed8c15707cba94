"""The batches of an engine that is lost are dispatched again."""

from tests.unit.trainer.run.slow_engine import SlowEngine, dispatcher


def test_samples_of_a_lost_engine_are_captured_first_in_the_same_batches(make_schedule):
    schedule = make_schedule([5] * 20, global_batch_tokens=5, capture_tokens=5)
    lost, other = SlowEngine(), SlowEngine()
    sent = dispatcher(schedule, [lost, other], window_tokens=1000)
    sent.start(schedule.items(0))
    sent.lost(0)
    assert len(lost.asked) == len(other.asked) == 2
    other.finish()
    other.finish()
    assert other.asked[2:] == lost.asked
    sent.regained(0)
    assert len(lost.asked) == 4
    for _ in range(40):
        for engine in (lost, other):
            if len(engine.running) > 2 * (engine is lost):  # its first two futures stay for ever
                engine.running.pop(-1).set_result(None)
    samples = [sample for batch in lost.asked[2:] + other.asked for sample in batch]
    assert len(samples) == len(set(samples)) == 20


def test_samples_that_a_rank_has_not_released_are_captured_again(make_schedule):
    """It may have died as it sent it. The batch stays whole, so its bits do."""
    schedule = make_schedule([5] * 8, global_batch_tokens=10, capture_tokens=10)
    lost, other = SlowEngine(), SlowEngine()
    sent = dispatcher(schedule, [lost, other], window_tokens=1000)
    sent.start(schedule.items(0))
    lost.finish()
    first = lost.asked[0]
    sent.released(0, first[0])
    sent.lost(0)
    other.finish()
    other.finish()
    assert other.asked[2] == first
    assert [other.destinations[request] for request in first] == [(), ("rank-0",)]
    sent.released(0, first[1])
    other.finish()
    sent.regained(0)
    assert first not in lost.asked[1:]


def test_a_samples_room_is_kept_until_its_batch_is_captured(make_schedule):
    schedule = make_schedule([5] * 8, global_batch_tokens=10, capture_tokens=10)
    lost, other = SlowEngine(), SlowEngine()
    sent = dispatcher(schedule, [lost, other], window_tokens=20)
    sent.start(schedule.items(0))
    (batch,) = lost.asked
    sent.released(0, batch[0])  # the engine dies with the other one in its hands
    sent.lost(0)
    assert other.asked[1:] == [batch]
    sent.released(0, batch[1])
    assert len(other.asked) == 2
    other.running.pop(1).set_result(None)
    assert len(other.asked) == 3
