"""The counters in SGLang's metrics; their names are from SGLang 0.5.23's source, and no real server was asked."""

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_engine_sglang.server_counters import sglang_counters

PLAIN = """sglang:generation_tokens_total{model_name="m"} 42.0
sglang:num_requests_total{model_name="m"} 2.0
sglang:cached_tokens_total{model_name="m"} 16.0
"""


def test_accepted_tokens_are_those_of_neither_the_prefill_nor_the_target():
    assert sglang_counters(PLAIN) == ServerCounters(generated_tokens=42, cached_tokens=16)
    speculating = sglang_counters(f"{PLAIN}sglang:spec_verify_calls_total 25\n")
    assert speculating is not None
    assert speculating.acceptance == AcceptanceCounters(rounds=25, accepted=42 - 2 - 25)


def test_the_latency_between_tokens_is_a_histogram():
    name = "sglang:inter_token_latency_seconds_bucket"
    lines = f'{name}{{le="0.01"}} 3.0\n{name}{{le="+Inf"}} 5.0\n'
    counters = sglang_counters(PLAIN + lines)
    assert counters is not None
    assert counters.inter_token_latency == ((0.01, 3), (float("inf"), 5))
