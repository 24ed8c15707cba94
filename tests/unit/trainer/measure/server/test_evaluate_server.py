"""``evaluate --server`` against servers that count what they do; every figure is compared with their own counts."""

import asyncio
import json
from statistics import fmean

import pytest

from spec_kit.live_traffic import LiveRequests, LiveRequestsConfig

from .streaming_server import NUM_DRAFT_TOKENS, of_bench, streaming


def test_figures_of_a_server_are_those_that_it_counted(evaluate, bench):
    with streaming() as (url, served):
        code, out, _ = evaluate(*of_bench(url, bench, "--concurrency", "1,3", "--max-new-tokens", 12))
    document = json.loads(out)
    timed = [body for body in served.bodies if body["max_tokens"] == 12]
    assert (code, document["server"], document["engine"]) == (0, url, "vllm")
    assert (document["model"], document["prompts"], len(timed)) == ("the model", 5, 2 * 5)
    assert served.most_at_once <= 3
    warm = [body for body in served.bodies if body["max_tokens"] == 8]
    assert len(warm) == 1 + 3
    assert document["rounds"] < served.rounds  # those of the warm-up are not among them
    assert document["drafted"] == NUM_DRAFT_TOKENS * document["rounds"]
    assert document["acceptance_length"] == 1 + document["accepted"] / document["rounds"]
    # Each answer begins with the prefill's token, and every other part is one round's.
    assert document["generated_tokens"] == 2 * 5 + document["rounds"] + document["accepted"]
    assert len(document["acceptance_per_position"]) == NUM_DRAFT_TOKENS
    assert [entry["concurrency"] for entry in document["throughput"]] == [1, 3]
    for entry in document["throughput"]:
        side = entry["with_draft"]
        assert 0 < side["time_to_first_token_ms"]["p50"] <= side["time_to_first_token_ms"]["p99"]
        assert (entry["speedup"], entry["without_draft"]) == (None, None)
    assert (document["outputs_equal"], document["acceptance_length_per_request"]) == (None, None)
    assert not any("meanwhile" in warning or "not whole" in warning for warning in document["warnings"])


def test_each_answer_s_own_acceptance_is_averaged_if_the_server_reports_it(evaluate, bench):
    """Cut to seven tokens, answers of 1, 2 and 3 tokens a round have rounds of different numbers."""
    with streaming(reports_acceptance=True) as (url, served):
        words = of_bench(url, bench, "--max-new-tokens", 7)
        document = json.loads(evaluate(*words)[1])
        table = evaluate(*(word for word in words if word != "--json"))[1]
    asked = served.bodies[1:6]  # behind a warm-up
    lengths = [1 + len(body["messages"][0]["content"]) % 3 for body in asked]
    assert document["acceptance_length_per_request"] == pytest.approx(fmean(lengths))
    assert document["acceptance_length"] < fmean(lengths)
    assert f"the mean of each answer's own: {fmean(lengths):.2f}" in table


def test_the_request_is_that_of_a_stream_with_its_usage(evaluate, bench):
    words = ("--no-stop-at-eos", "--seed", 7, "data.chat_template_kwargs.enable_thinking=false")
    with streaming() as (url, served):
        assert evaluate(*of_bench(url, bench, *words))[0] == 0
    body = served.bodies[-1]
    assert body.pop("messages")[0]["content"].startswith("How many hens")
    assert body == {
        "model": "the model", "max_tokens": 128, "temperature": 0.0, "seed": 7, "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False}, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_no_question_is_kept_by_a_server_that_keeps_every_request(evaluate, bench):
    """Else ``follow`` would train on the questions of its own measurement, warm-ups included."""
    kept = LiveRequests(LiveRequestsConfig(share=1.0), timed=False)
    with streaming() as (url, served):
        assert evaluate(*of_bench(url, bench, "--concurrency", "1,3"))[0] == 0

    async def admitted(scope: dict) -> bool:
        kept.begin(scope, lambda: None)
        return kept.admits("id")

    assert not any(asyncio.run(admitted(scope)) for scope in served.scopes)
    assert kept.take()["left_out"] == {"opted_out": len(served.bodies)}


def test_counters_that_go_back_give_no_acceptance(evaluate, bench, monkeypatch):
    """As of a server that starts anew, or of two behind one address."""
    monkeypatch.setattr("spec_trainer.measure.server.load._SETTLING_S", 0.0)
    asked = []
    with streaming(generated=9000, rounds=4000, per_position=[3000, 1500, 500]) as (url, served):

        def started_anew(prompt):
            asked.append(prompt)
            if len(asked) == 3:  # behind the warm-up
                served.generated, served.rounds, served.per_position[:] = 0, 0, [0, 0, 0]
            return [1, 2, 2]

        served.parts_of = started_anew
        document = json.loads(evaluate(*of_bench(url, bench))[1])
    assert document["acceptance_length"] is None
    assert any("not whole; has it started anew" in warning for warning in document["warnings"])


def test_answers_without_any_token_are_no_pass_to_measure(evaluate, bench):
    with streaming() as (url, _), streaming(parts_of=lambda prompt: []) as (baseline, _):
        code, out, error = evaluate(*of_bench(url, bench, "--baseline-server", baseline))
    assert (code, out) == (1, "")
    assert f"{baseline} says that its answers have no tokens (5)" in error


def test_a_baseline_gives_speed_up_and_equal_texts(evaluate, bench):
    with streaming() as (url, _), streaming(speculates=False) as (baseline, _):
        words = of_bench(url, bench, "--baseline-server", f"{baseline}/v1")
        code, out, _ = evaluate(*words)
        table = evaluate(*(word for word in words if word != "--json"))[1]
    document = json.loads(out)
    (entry,) = document["throughput"]
    assert (code, document["baseline_server"]) == (0, baseline)
    assert entry["speedup"] == entry["tokens_per_s"] / entry["tokens_per_s_without_draft"]
    assert (document["outputs_equal"], document["first_differences"]) == (True, [])
    for line in ("greedy texts of the two servers are equal", "by the server's counters", "baseline"):
        assert line in table
    assert any(line.startswith("the draft ") for line in table.splitlines())


@pytest.mark.parametrize("has_baseline", [False, True])
def test_the_report_has_the_figures_and_plots_of_the_servers(evaluate, bench, tmp_path, has_baseline):
    page = tmp_path / "server.html"
    with streaming() as (url, _), streaming(speculates=False) as (baseline, _):
        words = ["--baseline-server", baseline] if has_baseline else []
        code, out, _ = evaluate(
            *of_bench(url, bench, "--concurrency", "1,3", "--seed", 5, "--report", page, *words)
        )
    shown, warnings = page.read_text(), json.loads(out)["warnings"]
    assert code == 0
    for part in (f"server: {url}, vllm, model the model", "acceptance length τ", "; seed 5</p>", *warnings):
        assert part in shown
    assert shown.count("<svg") == (6 if has_baseline else 5)
    assert ("speed-up by the draft" in shown) == has_baseline


def test_texts_that_differ_are_told_with_their_place(evaluate, bench):
    with streaming(says="Well, ") as (url, _), streaming(says="Well? ", speculates=False) as (baseline, _):
        document = json.loads(evaluate(*of_bench(url, bench, "--baseline-server", baseline))[1])
    assert (document["outputs_equal"], document["outputs_differing_share"]) == (False, 1.0)
    assert document["first_differences"][0] == {"prompt": 0, "character": 4}


def test_sampled_texts_are_not_compared(evaluate, bench):
    with streaming() as (url, _), streaming(speculates=False) as (baseline, _):
        words = ("--baseline-server", baseline, "--temperature", 0.7)
        document = json.loads(evaluate(*of_bench(url, bench, *words))[1])
    assert (document["outputs_equal"], document["temperature"]) == (None, 0.7)


def test_a_baseline_that_speculates_is_warned_of(evaluate, bench):
    with streaming() as (url, _), streaming() as (baseline, _):
        document = json.loads(evaluate(*of_bench(url, bench, "--baseline-server", baseline))[1])
    assert "the baseline server speculates, too: start it without a draft" in document["warnings"]


def test_sglang_counts_rounds_and_what_is_left_was_accepted(evaluate, bench):
    with streaming(engine="sglang", parts_of=lambda prompt: [1, 3, 3, 2]) as (url, _):
        document = json.loads(evaluate(*of_bench(url, bench))[1])
    assert (document["engine"], document["rounds"], document["accepted"]) == ("sglang", 15, 25)
    assert (document["acceptance_length"], document["drafted"]) == (1 + 25 / 15, None)


@pytest.mark.parametrize("fields", [{"engine": ""}, {"speculates": False}])
def test_tau_is_not_known_of_a_server_without_counters(evaluate, bench, fields):
    with streaming(**fields) as (url, _):
        words = of_bench(url, bench)
        document = json.loads(evaluate(*words)[1])
        table = evaluate(*words[:-1])[1]
    assert (document["acceptance_length"], document["rounds"]) == (None, None)
    assert (
        "acceptance length (tau): not known; the server's /metrics has no usable counters of a draft" in table
    )


def test_answers_of_gsm8k_are_graded_on_both_servers(evaluate, bench):
    """Every answer ends with the number of its last part."""
    with (
        streaming(parts_of=lambda prompt: [1, 1, 1, 1]) as (url, _),
        streaming(parts_of=lambda prompt: [1, 1], speculates=False) as (baseline, _),
    ):
        words = of_bench(url, bench, "--baseline-server", baseline)
        document = json.loads(evaluate(*words)[1])
        table = evaluate(*(word for word in words if word != "--json"))[1]
    assert (document["accuracy"], document["accuracy_without_draft"]) == (1.0, 0.0)
    assert "accuracy: 100.0 % of the answers are right, 0.0 % without the draft" in table


def test_requests_of_others_are_told(evaluate, bench):
    def parts_of(prompt: str) -> list[int]:
        served.generated += 1000
        return [1, 2]

    with streaming(parts_of=parts_of) as (url, served):
        document = json.loads(evaluate(*of_bench(url, bench))[1])
    (warning,) = [warning for warning in document["warnings"] if "meanwhile" in warning]
    assert warning.startswith(
        "tokens that the server has generated meanwhile: 5015, 15 of them for this command"
    )


def test_a_second_question_follows_the_baseline_s_answer(evaluate, bench):
    """Both servers are asked the same, whatever their own answers to the first question were."""
    with streaming() as (url, served), streaming(says="No: ", speculates=False) as (baseline, plain):
        words = ("--server", url, "--baseline-server", baseline, "--bench", "mt_bench", "--bench-data", bench)
        document = json.loads(evaluate(*words, "--json")[1])
    assert document["prompts"] == 4
    later = [body["messages"] for body in served.bodies if len(body["messages"]) == 3]
    assert later
    assert {messages[1]["content"][:4] for messages in later} == {"No: "}
    assert later[-1] in [body["messages"] for body in plain.bodies]
