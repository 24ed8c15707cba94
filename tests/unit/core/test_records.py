"""Records: what follows from their fields, and what they refuse."""

import dataclasses
import math
import statistics

import pytest
import torch

from spec_core import records
from spec_core.records import (
    AcceptanceCounters,
    Availability,
    DraftBatch,
    FeatureSample,
    FeatureSchema,
    ServerCounters,
    Span,
    StepOutput,
)


def batch(length: int, *bounds: tuple[int, int]) -> DraftBatch:
    spans = tuple(Span(sample_id=i, epoch=0, start=a, stop=b) for i, (a, b) in enumerate(bounds))
    return DraftBatch(
        input_ids_T=torch.zeros(length, dtype=torch.int64),
        hidden_TNH=torch.zeros(length, 1, 2),
        loss_mask_T=torch.zeros(length, dtype=torch.bool),
        spans=spans,
    )


def output(loss: float, hits: list[float], tries: list[float]) -> StepOutput:
    return StepOutput(
        loss=torch.tensor(loss, requires_grad=True),
        sums={"accuracy": torch.tensor(hits)},
        counts={"accuracy": torch.tensor(tries)},
    )


def test_every_record_is_frozen():
    found = [member for member in vars(records).values() if dataclasses.is_dataclass(member)]
    assert len(found) > 8
    assert all(member.__dataclass_params__.frozen for member in found)


def test_packed_documents_touch():
    packed = batch(7, (0, 3), (3, 4), (4, 7))
    assert packed.position_T.tolist() == [0, 1, 2, 0, 0, 1, 2]


def test_padding_has_no_document_and_no_position():
    padded = batch(8, (0, 2), (4, 7))
    assert padded.host_position_T.tolist() == [0, 1, -1, -1, 0, 1, 2, -1]
    assert padded.position_T.tolist() == [0, 1, 0, 0, 0, 1, 2, 0]


def test_batch_without_documents_is_all_padding():
    assert batch(3).host_position_T.tolist() == [-1, -1, -1]
    assert batch(0).position_T.tolist() == []


def test_schema_knows_its_shape_and_size():
    schema = FeatureSchema(layers=(0, 4, 8), hidden_size=16, dtype="bfloat16")
    assert schema.shape(5) == (5, 3, 16)
    assert schema.torch_dtype() is torch.bfloat16
    assert schema.bytes_per_token() == 3 * 16 * 2


def test_states_in_8_bits_are_rows_of_bytes_with_a_scale():
    schema = FeatureSchema(layers=(0, 4), hidden_size=16, dtype="bfloat16", sent_dtype="fp8_e4m3")
    assert schema.shape(5) == (5, 2, 16)
    assert schema.sent.shape(5) == (5, 2, 20)
    assert schema.sent.torch_dtype() is torch.uint8
    assert schema.sent.bytes_per_token() == 2 * (16 + 4)
    assert schema.sent.sent == schema.sent


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1, 2)])
def test_schema_wants_unique_ascending_layers(layers):
    with pytest.raises(ValueError, match="unique, ascending"):
        FeatureSchema(layers=layers, hidden_size=8, dtype="float32")


def test_sample_counts_ids_and_states():
    ids, hidden_TNH = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 2, 4)
    assert (
        FeatureSample(request_id=1, input_ids=ids, hidden_TNH=hidden_TNH).num_bytes == 5 * 8 + 5 * 2 * 4 * 4
    )


def test_outputs_add_up_before_they_are_divided():
    total = output(1.0, [1, 0], [1, 3]) + output(0.5, [0, 2], [3, 1])
    assert total.loss.item() == 1.5
    assert total.metrics() == {"accuracy": [0.25, 0.5]}


def test_metric_without_a_count_is_zero():
    assert output(0.0, [0, 0], [0, 0]).metrics() == {"accuracy": [0.0, 0.0]}


def test_detached_output_keeps_its_values_and_no_graph():
    before = output(1.5, [1], [2])
    after = before.detached()
    assert before.loss.requires_grad
    assert not after.loss.requires_grad
    assert after.loss.item() == 1.5
    assert after.metrics() == {"accuracy": [0.5]}


def test_acceptance_length_counts_the_bonus_token():
    counters = AcceptanceCounters(rounds=4, drafted=12, accepted=6, accepted_per_position=(3, 2, 1))
    assert counters.acceptance_length == 2.5
    assert counters.acceptance_per_position == [0.75, 0.5, 0.25]


def test_nothing_decoded_is_an_acceptance_length_of_one():
    assert AcceptanceCounters().acceptance_length == 1.0
    assert AcceptanceCounters(accepted_per_position=(0, 0)).acceptance_per_position == [0.0, 0.0]


def test_counters_of_rounds_and_positions_add_up():
    counted = AcceptanceCounters()
    for accepted, rounds in ((0, 5), (1, 2), (2, 1), (3, 0)):  # an answer of one token needs no round
        counted += AcceptanceCounters.of_rounds(3, accepted, rounds)
    assert counted == AcceptanceCounters(rounds=8, drafted=24, accepted=4, accepted_per_position=(3, 1, 0))


def test_counters_of_rounds_with_fewer_tokens_count_where_they_reach():
    one, two = AcceptanceCounters.of_rounds(1, 1), AcceptanceCounters.of_rounds(3, 2)
    nothing_proposed = AcceptanceCounters.of_rounds(0, 0)
    total = one + two + nothing_proposed
    assert total == AcceptanceCounters(rounds=3, drafted=4, accepted=3, accepted_per_position=(2, 1, 0))
    assert total - one == AcceptanceCounters(rounds=2, drafted=3, accepted=2, accepted_per_position=(1, 1, 0))


def test_the_error_of_the_acceptance_length_is_that_of_means_over_answers():
    """τ is the mean of each answer's own where all are as long; their variance counts, with n − 6 for n − 1."""
    accepted = [0, 4, 8, 8, 2, 6, 7, 3, 1, 5]
    counters = AcceptanceCounters(
        rounds=40,
        accepted=sum(accepted),
        answers=10,
        squared_rounds=10 * 4**2,
        squared_accepted=sum(number**2 for number in accepted),
        rounds_times_accepted=sum(4 * number for number in accepted),
    )
    own = [1 + number / 4 for number in accepted]
    assert counters.acceptance_length == pytest.approx(statistics.mean(own))
    expected = math.sqrt(statistics.variance(own) / 10 * (10 - 1) / (10 - 6))
    assert counters.acceptance_length_error == pytest.approx(expected)
    twice = counters + counters
    assert (twice.answers, twice.squared_accepted) == (20, 2 * counters.squared_accepted)
    assert twice - counters == counters


def test_few_answers_say_nothing_of_the_error():
    assert AcceptanceCounters(rounds=100, accepted=50, answers=6).acceptance_length_error == math.inf
    assert AcceptanceCounters(rounds=0, answers=100).acceptance_length_error == math.inf
    assert AcceptanceCounters.of_rounds(3, 2, rounds=100).acceptance_length_error == math.inf


def test_a_distribution_is_available_where_it_is_installed():
    found = Availability.of_distribution("pytest")
    assert (found.ok, dict(found.versions)) == (True, {"pytest": pytest.__version__})
    missing = Availability.of_distribution("no-such-thing")
    assert (missing.ok, missing.reason) == (
        False,
        "no-such-thing is not installed; pip install no-such-thing",
    )


def test_quantiles_of_latencies_are_interpolated_as_prometheus_does() -> None:
    before = ServerCounters(generated_tokens=0, inter_token_latency=((0.01, 5), (0.1, 5), (math.inf, 5)))
    now = ServerCounters(generated_tokens=9, inter_token_latency=((0.01, 55), (0.1, 95), (math.inf, 105)))
    since = now - before
    assert since.inter_token_latency == ((0.01, 50), (0.1, 90), (math.inf, 100))
    assert since.latency_quantile(0.25) == pytest.approx(0.005)
    assert since.latency_quantile(0.7) == pytest.approx(0.01 + 0.09 * 20 / 40)
    assert since.latency_quantile(0.99) == math.inf
    assert (now - now).latency_quantile(0.99) is None
    assert ServerCounters(generated_tokens=3).latency_quantile(0.99) is None
