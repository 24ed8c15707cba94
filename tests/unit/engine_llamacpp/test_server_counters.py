"""The counters of a llama.cpp server, from the page of metrics of a real one."""

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_engine_llamacpp.server_counters import llamacpp_counters

PAGE = """\
# HELP llamacpp:prompt_tokens_cached_total Number of prompt tokens reused from the cache
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 5
llamacpp:prompt_seconds_total 0.01482
llamacpp:tokens_predicted_total 44
llamacpp:n_decode_total 40
llamacpp:spec_decode_num_draft_tokens_total 112
llamacpp:spec_decode_num_accepted_tokens_total 4
llamacpp:spec_decode_num_drafts_total 38
llamacpp:requests_processing 0
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 0
"""


def test_a_page_of_a_server_that_speculates():
    assert llamacpp_counters(PAGE) == ServerCounters(
        generated_tokens=44,
        cached_tokens=5,
        acceptance=AcceptanceCounters(rounds=38, drafted=112, accepted=4, accepted_per_position=(2, 2, 0)),
    )


def test_a_server_without_a_draft_has_no_acceptance():
    page = PAGE.replace("drafts_total 38", "drafts_total 0")
    assert llamacpp_counters(page) == ServerCounters(generated_tokens=44, cached_tokens=5)
