"""Pages of metrics, well made and not."""

import pytest

from spec_kit.live_traffic import ServerMetrics

PAGE = r"""
# HELP vllm:tokens_total Number of tokens.
# TYPE vllm:tokens_total counter
vllm:tokens_total{engine="0",model_name="a \"b\" }{"} 3.0
vllm:tokens_total{engine="1",model_name="m"} 1.2e+03 1700000000000
plain_total 7
gone_total NaN
vllm:pos_total{position="0",engine="0"} 5
vllm:pos_total{position="0",engine="1"} 1
vllm:pos_total{engine="0",position="1"} 2
vllm:pos_total{engine="0"} 9
"""


def test_counters_are_summed_over_labels():
    metrics = ServerMetrics(PAGE)
    assert metrics.total("vllm:tokens_total") == 1203
    assert metrics.total("plain_total") == 7
    assert metrics.by_label("vllm:pos_total", "position") == {"0": 6, "1": 2}
    assert metrics.by_label("absent", "position") == {}


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e400", "9" * 400, "x", ""])
def test_what_is_no_count_is_not_there(value):
    assert ServerMetrics(f"a_total {value}\n").total("a_total") is None


def test_labels_may_hold_whatever_prometheus_own_client_escapes():
    """The lines are those that prometheus_client 0.26 has written."""
    labels = [r"quote \" here", r"back\\slash", r"new\nline", "{}=,"]
    lines = [
        f'answers_total{{name="{label}",position="{number}"}} {10.0**number}'
        for number, label in enumerate(labels)
    ]
    metrics = ServerMetrics("\n".join(lines))
    assert metrics.total("answers_total") == 1111
    assert metrics.by_label("answers_total", "position") == {"0": 1, "1": 10, "2": 100, "3": 1000}


def test_a_histogram_is_summed_and_ascending():
    lines = [
        'h_bucket{engine="0",le="+Inf"} 9', 'h_bucket{engine="0",le="0.1"} 3.0',
        'h_bucket{engine="1",le="0.1"} 4', 'h_bucket{engine="0",le="0.025"} 1',
        'h_bucket{engine="0",le="NaN"} 1', 'h_bucket{engine="0",le="x"} 1', "h_sum 3.5",
    ]  # fmt: skip
    metrics = ServerMetrics("\n".join(lines))
    assert metrics.histogram("h") == ((0.025, 1), (0.1, 7), (float("inf"), 9))
    assert metrics.histogram("other") == ()


def test_rounds_without_their_accepted_tokens_are_no_acceptance():
    page = "vllm:spec_decode_num_drafts_total 10\n"
    assert ServerMetrics(page).acceptance("vllm") is None
    found = ServerMetrics(f"{page}vllm:spec_decode_num_accepted_tokens_total 12\n").acceptance("vllm")
    assert found is not None
    assert found.acceptance_length == 2.2
