"""The counters in vLLM's metrics; names were read in vLLM 0.32's sources, and tests/engines asks a real server."""

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_engine_vllm.server_counters import vllm_counters

PLAIN = """vllm:generation_tokens_total{engine="0"} 40.0
vllm:generation_tokens_total{engine="1"} 2.0
vllm:prefix_cache_hits_total{engine="0"} 16.0
"""
SPECULATION = """vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="99999999999"} 1.0
"""


def test_counters_of_a_server_with_a_draft_and_of_one_without():
    plain = ServerCounters(generated_tokens=42, cached_tokens=16)
    assert vllm_counters(PLAIN) == plain
    with_draft = vllm_counters(PLAIN + SPECULATION)
    assert with_draft is not None
    expected = AcceptanceCounters(rounds=10, drafted=30, accepted=12, accepted_per_position=(8, 4))
    assert with_draft.acceptance == expected
    assert with_draft - plain == ServerCounters(generated_tokens=0, acceptance=expected)


def test_the_latency_between_tokens_is_a_histogram():
    name = "vllm:inter_token_latency_seconds_bucket"
    lines = f'{name}{{le="0.01"}} 3.0\n{name}{{le="+Inf"}} 5.0\n'
    counters = vllm_counters(PLAIN + lines)
    assert counters is not None
    assert counters.inter_token_latency == ((0.01, 3), (float("inf"), 5))
