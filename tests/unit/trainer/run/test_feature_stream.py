"""A rank's micro-batches from a real receiver: every sample in its place, whenever it arrives."""

import threading
from pathlib import Path

import pytest
import torch

from spec_core.errors import DeadlineExceeded, EngineError, ProtocolError
from spec_core.records import FeatureSample, FeatureSchema
from spec_kit.streams.inline_transport import InlineTransport
from spec_trainer.configuration.data import DataConfig
from spec_trainer.configuration.run import AnyRunConfig, TimeoutsConfig
from spec_trainer.run.feature_stream import FeatureStream

CPU = torch.device("cpu")
SCHEMA = FeatureSchema(layers=(1, 2), hidden_size=3, dtype="float32")


class Setting:
    """A stream, the sender at its other end, and what it has released."""

    def __init__(self, schedule, packing=True, step_s=5.0) -> None:
        config = AnyRunConfig(
            target="t",
            output=Path("o"),
            data=DataConfig(path="d", packing=packing),
            timeouts=TimeoutsConfig(step_s=step_s),
        )
        self.transport = InlineTransport()
        self.schedule = schedule
        self.released: list[tuple[int, ...]] = []
        """Rank and request ids of each call."""
        self.receiver = self.transport.listen(SCHEMA, 1 << 20)
        self.sender = self.transport.connect(self.receiver.address, SCHEMA, 1.0)
        self.stream = FeatureStream(
            schedule, 0, self.receiver, SCHEMA, config, CPU, lambda *freed: self.released.append(freed)
        )

    def send(self, item, sample_id, ids=None) -> None:
        """Hidden states are the sample's ids, layer by layer ten times as large."""
        if ids is None:
            ids = torch.from_numpy(self.schedule.dataset.sample(sample_id).input_ids).long()
        self.sender.send(
            FeatureSample(
                request_id=self.schedule.request_id(item, sample_id), input_ids=ids, hidden_TNH=hidden(ids)
            ),
            1.0,
        )


def hidden(ids) -> torch.Tensor:
    return ids.float()[:, None, None] * torch.tensor([1.0, 10.0])[:, None] * torch.ones(3)


@pytest.mark.parametrize("packing", [True, False])
def test_samples_land_in_their_spans_in_any_order(make_schedule, packing):
    schedule = make_schedule([4, 7, 2], accumulation=2)
    setting = Setting(schedule, packing)
    (item,) = schedule.items(0)
    for sample_id in (2, 0, 1):
        setting.send(item, sample_id)
    batches = setting.stream.micro_batches(item)
    placed = {span.sample_id: (batch, span) for batch in batches for span in batch.spans}
    assert len(batches) == 2
    assert sorted(placed) == [0, 1, 2]
    for sample_id, (batch, span) in placed.items():
        ids = torch.arange(100 * sample_id, 100 * sample_id + schedule.dataset.lengths[sample_id])
        where = slice(span.start, span.stop)
        assert torch.equal(batch.input_ids_T[where], ids)
        assert torch.equal(batch.hidden_TNH[where], hidden(ids))
        assert torch.equal(batch.loss_mask_T[where], torch.arange(len(ids)) > 0)
    assert sum(len(batch.input_ids_T) for batch in batches) == (13 if packing else 7 + 2 * 4)


def test_padding_is_zero_and_not_supervised(make_schedule):
    schedule = make_schedule([5, 2])
    setting = Setting(schedule, packing=False)
    (item,) = schedule.items(0)
    setting.send(item, 0)
    setting.send(item, 1)
    (batch,) = setting.stream.micro_batches(item)
    assert batch.host_position_T.tolist() == [0, 1, 2, 3, 4, 0, 1, -1, -1, -1]
    assert not batch.hidden_TNH[7:].any()
    assert not batch.loss_mask_T[7:].any()


def test_samples_of_a_later_item_wait_and_hold_their_memory(make_schedule):
    schedule = make_schedule([12, 8, 20])
    setting = Setting(schedule)
    first, second = schedule.items(0)
    setting.send(second, 2)
    setting.send(first, 0)
    setting.send(first, 1)
    setting.stream.micro_batches(first)
    assert setting.released == [(0, 3, 4)]
    (batch,) = setting.stream.micro_batches(second)
    assert setting.released == [(0, 3, 4), (0, 11)]
    assert batch.input_ids_T[0] == 200


def test_the_same_sample_may_be_under_way_for_two_items(make_schedule):
    schedule = make_schedule([10], epochs=2)
    setting = Setting(schedule)
    first, second = schedule.items(0)
    setting.send(second, 0)
    setting.send(first, 0)
    assert [
        batch.spans[0].epoch for item in (first, second) for batch in setting.stream.micro_batches(item)
    ] == [0, 1]


@pytest.mark.parametrize("ids", [[0, 1, 3], [0, 1], [0, 1, 2, 3]])
def test_other_tokens_than_the_samples_are_refused(make_schedule, ids):
    schedule = make_schedule([3])
    setting = Setting(schedule)
    (item,) = schedule.items(0)
    setting.send(item, 0, ids=torch.tensor(ids))

    def train() -> None:
        setting.stream.micro_batches(item)
        setting.stream.check()

    with pytest.raises(ProtocolError, match="captured other tokens than sample 0 has"):
        train()
    assert setting.released == [(0, 1)] * (len(ids) == 3)


def test_a_check_speaks_of_what_came_since_the_last_one(make_schedule):
    schedule = make_schedule([3, 4])
    setting = Setting(schedule)
    (item,) = schedule.items(0)
    setting.send(item, 0)
    setting.send(item, 1, ids=torch.tensor([100, 101, 102, 7]))
    setting.stream.micro_batches(item)
    with pytest.raises(ProtocolError, match="sample 1 has"):
        setting.stream.check()
    setting.stream.check()


def test_preparing_takes_what_is_there_and_waits_for_nothing(make_schedule):
    schedule = make_schedule([3, 4])
    setting = Setting(schedule, step_s=60)
    (item,) = schedule.items(0)
    setting.send(item, 1)
    setting.stream.prepare(item)
    assert setting.released == [(0, 3)]
    setting.send(item, 0)
    (batch,) = setting.stream.micro_batches(item)
    assert setting.released == [(0, 3), (0, 2)]
    assert torch.equal(batch.hidden_TNH[:, 0, 0], batch.input_ids_T.float())


def test_room_is_reported_before_a_wait_that_may_need_it(make_schedule):
    """The second sample is only sent once the first one is released."""
    schedule = make_schedule([3, 4])
    setting = Setting(schedule, step_s=60)
    (item,) = schedule.items(0)
    calls: list[tuple[int, ...]] = []

    def note(*freed: int) -> None:
        calls.append(freed)
        if len(calls) == 1:
            setting.send(item, 1)

    setting.stream._released = note
    setting.send(item, 0)
    setting.stream.micro_batches(item)
    assert calls == [(0, 2), (0, 3)]


def test_features_that_do_not_come_end_the_wait_at_its_deadline(make_schedule):
    schedule = make_schedule([3, 4])
    setting = Setting(schedule, step_s=0.05)
    (item,) = schedule.items(0)
    setting.send(item, 0)
    with pytest.raises(DeadlineExceeded, match=r"rank 0: 1 sample of step 0 .* timeouts.step_s=0.05"):
        setting.stream.micro_batches(item)


def test_a_failed_engine_ends_the_wait_with_its_own_words(make_schedule):
    schedule = make_schedule([3])
    setting = Setting(schedule, step_s=60)
    cause = EngineError("the target is on fire")
    threading.Timer(0.1, setting.stream.fail, [cause]).start()
    with pytest.raises(EngineError, match="capture failed: the target is on fire") as caught:
        setting.stream.micro_batches(next(schedule.items(0)))
    assert caught.value.__cause__ is cause


def test_without_samples_a_rank_gets_padding(make_schedule):
    """One sample, two passes: one of them has nothing to do, and nothing to wait for."""
    schedule = make_schedule([4], accumulation=2)
    setting = Setting(schedule)
    (item,) = schedule.items(0)
    setting.send(item, 0)
    batches = setting.stream.micro_batches(item)
    assert [len(batch.spans) for batch in batches] == [1, 0]
    assert len(batches[1].input_ids_T) > 0
    assert not batches[1].loss_mask_T.any()


def test_what_an_engine_that_was_lost_had_sent_too_is_dropped(make_schedule):
    """Whether the first one is in its place, waits for a later item, or its item is done; evaluations likewise."""
    schedule = make_schedule([4, 4, 4], held_out=[4, 4], global_batch_tokens=4, eval_every=1)
    setting = Setting(schedule)
    items = list(schedule.items(0))
    assert [item.evaluates for item in items[:4]] == [False, True, True, False]
    for number, item in enumerate(items):
        for repeated in (*items[:number], *items[number + 1 :], item, item):
            setting.send(repeated, repeated.sample_ids[0])
        (batch,) = setting.stream.micro_batches(item)
        assert [span.sample_id for span in batch.spans] == list(item.sample_ids)
        assert batch.evaluates == item.evaluates
    wanted = [(0, schedule.request_id(item, item.sample_ids[0])) for item in items]
    assert setting.released == wanted
    assert setting.stream._early == {}
    assert setting.receiver._held == {}


def test_a_lost_engine_is_no_failure_while_another_may_come(make_schedule):
    schedule = make_schedule([4])
    setting = Setting(schedule, step_s=60)
    (item,) = schedule.items(0)
    setting.sender.close()

    def come() -> None:
        setting.sender = setting.transport.connect(setting.receiver.address, SCHEMA, 1.0)
        setting.send(item, 0)

    threading.Timer(0.1, come).start()
    (batch,) = setting.stream.micro_batches(item)
    assert len(batch.spans) == 1
