"""``follow_serving`` computes its figures from the times of tokens, and a shallow target answers as its rows say."""

import ast
import doctest
import json
import random
from pathlib import Path

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import AcceptanceCounters, SamplingParams, ServerCounters
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets import read_target

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def answer(begun_s, times_s, tokens, **fields):
    usual = {"status": 200, "draft_version": "2", "complete": True}
    return {"begun_s": begun_s, "times_s": times_s, "tokens": tokens, **usual, **fields}


def moment(at_s, generated, rounds, accepted, trained):
    from follow_figures import Window

    acceptance = AcceptanceCounters(rounds=rounds, drafted=3 * rounds, accepted=accepted)
    latency = ((0.01, generated // 2), (0.025, generated), (float("inf"), generated))
    steps = {"steps": trained // 100, "tokens": trained, "samples": 1, "verdicts": 0, "pushes": 0}
    counters = ServerCounters(generated_tokens=generated, acceptance=acceptance, inter_token_latency=latency)
    return Window(at_s, counters, steps)


def test_figures_are_of_the_window_alone():
    from follow_figures import figures

    answers = [
        answer(9.0, [9.5, 10.5, 11.0], [1, 2, 1]),  # begun before the window
        answer(12.0, [12.25, 12.5, 13.0], [1, 4, 1]),
        answer(19.0, [19.5, 20.5], [1, 1], status=200, complete=False),  # ends after it, and is cut off
    ]
    found = figures(answers, moment(10.0, 100, 10, 5, 1000), moment(20.0, 300, 60, 105, 3000))
    assert found["output_tokens_per_s"] == pytest.approx((2 + 1 + 1 + 4 + 1 + 1) / 10)
    assert found["requests"] == 2
    assert found["failed_requests"] == 1
    assert found["versions_in_answers"] == [2]
    assert found["first_token_ms"]["count"] == 2
    assert found["first_token_ms"]["longest_ms"] == pytest.approx(500)
    # Two tokens in 1 s, one in 0.5 s; four in 0.25 s, one in 0.5 s.
    assert found["inter_token_ms"]["count"] == 8
    assert found["inter_token_ms"]["longest_ms"] == pytest.approx(500)
    assert found["server"]["output_tokens_per_s"] == pytest.approx(20)
    assert found["server"]["acceptance_length"] == pytest.approx(3)
    assert found["trainer"]["tokens_per_s"] == pytest.approx(200)


def test_another_server_is_passed_where_the_throughput_stays_above_its_own():
    from follow_figures import crossing, series

    moments = [moment(100.0 + 5.0 * number, 0, number, number, 0) for number in range(8)]
    tokens = [10, 60, 10, 40, 60, 60, 60]
    answers = [
        answer(5.0 * place, [101.0 + 5.0 * place], [number], complete=place != 0)
        for place, number in enumerate(tokens)
    ]
    rows = series(answers, moments, 90.0)
    assert [row["output_tokens_per_s"] for row in rows] == pytest.approx([number / 5 for number in tokens])
    assert [row["acceptance_length"] for row in rows] == pytest.approx([2.0] * 7)
    assert [row["requests"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert (rows[0]["begun_s"], rows[0]["at_s"], rows[-1]["at_s"]) == (10.0, 15.0, 45.0)

    def line(*points):
        return [
            {"begun_s": at_s - 1, "at_s": at_s, "output_tokens_per_s": speed, "acceptance_length": None}
            for at_s, speed in points
        ]

    found = crossing(rows, line((9.0, 11.0), (50.0, 9.0)))
    assert (found["at_s"], found["requests"], found["line_tokens_per_s"]) == (35.0, 4, 11.0)
    assert crossing(rows, line((9.0, 7.0)))["at_s"] == 30.0
    # A window is compared with the neighbours that it does not overlap.
    assert crossing(rows, line((9.0, 11.0), (26.0, 7.0)))["at_s"] == 35.0
    assert crossing(rows, line((9.0, 11.0), (20.0, 7.0), (31.0, 7.0)))["at_s"] == 30.0
    assert crossing(rows, line((9.0, 13.0), (50.0, 1.0))) is None
    assert crossing(rows, []) is None


def test_a_budget_is_a_bound_of_the_histogram_above_the_p99():
    from follow_figures import bound_ms

    counters = moment(0.0, 100, 1, 1, 0).counters
    assert bound_ms(counters, 0.008) == pytest.approx(10)
    assert bound_ms(counters, 0.009) == pytest.approx(25)
    assert bound_ms(counters, 0.03) is None


def test_the_day_says_who_was_passed_and_when(tmp_path):
    from follow_day_0 import summary, verdicts

    def rows(times, speeds):
        return [
            {"begun_s": at_s - 2, "at_s": at_s, "output_tokens_per_s": speed, "acceptance_length": 1.5}
            | {"requests": int(at_s), "steps": 0, "verdicts": 0, "pushes": 0}
            for at_s, speed in zip(times, speeds, strict=True)
        ]

    found = {
        "live": rows([2, 4, 6, 8, 32, 34, 36, 38], [20, 20, 20, 20, 8, 12, 13, 14]),
        "no-draft": rows([12, 42], [10, 10]),
        "ngram": rows([16, 46], [15, 15]),
    }
    day = summary(found, 30.0, [], [])
    # Windows from before the draft began to learn show nothing of it.
    assert day["crossed"]["no-draft"]["at_s"] == 34
    assert day["crossed"]["ngram"] is None
    assert day["before"] == {"live": 20, "no-draft": 10, "ngram": 15}
    assert day["last"] == {"live": pytest.approx(127 / 8), "no-draft": 10, "ngram": 15}
    assert summary(found, 0.0, [], [])["crossed"] == {}
    row = {"step": 3, "requests": 7, "acceptance_length": 1.5, "acceptance_length_served": 1.0, "served": 3}
    (tmp_path / "versions.jsonl").write_text(json.dumps(row | {"version": 1, "time": 120.0, "chance": 0.1}))
    assert verdicts(tmp_path, 100.0) == [{"at_s": 20.0, **row, "version": 1}]
    assert verdicts(None, 100.0) == []


def test_the_run_directory_says_what_has_been_trained(tmp_path):
    from follow_figures import trained

    steps = [{"step": 1, "tokens": 30, "samples": 2}, {"step": 2, "tokens": 50, "samples": 3}]
    lines = [json.dumps(row) for row in steps] + ['{"step": 3, "tok']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    verdicts = [{"step": 2, "served": 2}, {"step": 4, "served": 2}]
    (tmp_path / "versions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verdicts))
    assert trained(tmp_path) == {"steps": 2, "tokens": 80, "samples": 5, "verdicts": 2, "pushes": 1}
    assert not any(trained(None).values())


def test_prompts_are_parts_of_the_texts_and_differ_by_seed():
    from serving_load import drawn_prompt

    texts = [list(range(100)), list(range(200, 230))]
    prompts = [drawn_prompt(random.Random(seed), texts, 8, 512) for seed in range(20)]
    assert all(
        any(prompt == text[at : at + 8] for text in texts for at in range(len(text))) for prompt in prompts
    )
    assert len({tuple(prompt) for prompt in prompts}) > 15
    assert len(drawn_prompt(random.Random(1), [], 8, 512)) == 8


def test_tokens_of_a_message_are_counted():
    from serving_load import num_tokens

    assert num_tokens(b'data: {"choices": [{"index": 0, "token_ids": [4, 5, 6]}]}\n', 2) == 3
    assert num_tokens(b'data: {"choices": [], "usage": {}}\n', 3) == 0
    sglang = b'data: {"output_ids": [1, 2, 3], "meta_info": {"completion_tokens": 7}}\n'
    assert num_tokens(sglang, 4) == 3


def test_a_shallow_target_answers_what_its_rows_say(tmp_path):
    from random_target import write_random_target
    from shallow_answers import shallow_answers

    folder = write_random_target("toy", tmp_path / "target", "float32", shallow=True)
    rows = shallow_answers(folder, 6, 12).tolist()
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(folder), context) as engine:
        sampling = SamplingParams(max_new_tokens=11, stop_at_eos=False)
        answers = engine.generate([row[:1] for row in rows], sampling)
    assert [list(one.token_ids) for one in answers] == [row[1:] for row in rows]
    assert len({tuple(row) for row in rows}) == 6


def test_questions_of_the_new_kind_are_different_and_hold_computed_examples(monkeypatch):
    from real_questions import different, function, new_questions, prose_questions

    monkeypatch.setattr("sysconfig.get_path", lambda _: str(Path(ast.__file__).parent / "email"))
    questions = new_questions(150, 0)
    assert questions == new_questions(150, 0)
    assert questions != new_questions(150, 1)
    assert len(list(different(questions))) == len(questions) == 150
    assert 60 < sum("def " in text for text in questions) < 90
    one = "Ben has 12 apples and buys 3 more. How many apples are there now?"
    assert list(different([one, one.replace("12", "7"), "Who was Ben?"])) == [one, "Who was Ben?"]
    draw = random.Random(3)
    for _ in range(40):
        (node,) = ast.parse(function(draw)).body
        examples = doctest.DocTestParser().get_examples(ast.get_docstring(node))
        assert examples
        for example in examples:
            assert example.source.startswith(f"{node.name}(")
            ast.literal_eval(example.want)
    prose = [
        "Who wrote Emma?",
        "Fix this code: x",
        "What is 3 * 4?",
        "Write a poem about how many stars there are",
    ]
    assert prose_questions(prose) == prose[:1]


def test_a_draft_that_follows_is_judged_by_its_way_to_the_draft_of_the_new_kind():
    from follow_real import judged

    lengths = {
        "before": {"prose": 3.0, "new": 2.0},
        "after": {"prose": 2.97, "new": 2.95},
        "new kind": {"prose": 2.0, "new": 3.0},
    }
    found = judged(lengths, 1)
    assert (found["share_of_the_way"], found["kept"]) == (pytest.approx(0.95), pytest.approx(0.99))
    assert found["holds"] == {"share_of_the_way": True, "kept": True, "failed_requests": False}
    assert not judged(lengths | {"new kind": lengths["before"]}, 0)["holds"]["share_of_the_way"]
