"""Passes over a workload: their order, what is timed, what is counted."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_core import Engine
from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_trainer.cli.commands.evaluate import measure
from spec_trainer.measure.evaluation.measure import decode_without_draft
from spec_trainer.measure.evaluation.workload import Workload
from spec_trainer.workers.passes import decode

PROMPTS = [[1, 2], [3]]
GREEDY = SamplingParams(max_new_tokens=20, num_draft_tokens=3)
ROUND = AcceptanceCounters(rounds=10, drafted=30, accepted=15, accepted_per_position=(8, 4, 3))


class Scripted(Engine):
    """Twenty tokens for each prompt; counts ``ROUND`` for each pass with a draft; remembers what it was asked for."""

    def __init__(self, always_tells_gaps: bool = True, warm_up_s: float = 0.0) -> None:
        self.target = SimpleNamespace(eos_token_ids=())
        self.always_tells_gaps, self.warm_up_s = always_tells_gaps, warm_up_s
        self.asked: list[tuple[str | None, float, int, int]] = []
        """Draft, temperature, draft tokens, prompts; of passes that are no warm-up."""
        self.warm_ups: list[SamplingParams] = []
        self.draft: str | None = None
        self.rounds = 0

    def generate(self, prompts, sampling):
        self.rounds += bool(sampling.num_draft_tokens)
        if sampling.max_new_tokens < GREEDY.max_new_tokens:
            self.warm_ups.append(sampling)
            time.sleep(self.warm_up_s)
        else:
            self.asked.append((self.draft, sampling.temperature, sampling.num_draft_tokens, len(prompts)))
            time.sleep(0.01)
        gaps = (1.0,) * 20 if self.always_tells_gaps or sampling.with_margins else ()
        return [Generation(token_ids=tuple(range(20)), top2_margin=gaps) for _ in prompts]

    def load_draft(self, folder):
        self.draft, self.rounds = folder.name, 0

    def acceptance(self):
        times = self.rounds
        return AcceptanceCounters(
            rounds=ROUND.rounds * times,
            drafted=ROUND.drafted * times,
            accepted=ROUND.accepted * times,
            accepted_per_position=tuple(n * times for n in ROUND.accepted_per_position) if times else (),
        )

    def generate_unordered(self, next_request, sampling): ...
    def start(self, schema): ...
    def capture(self, requests, schema): ...
    def health(self): ...
    def close(self): ...


def test_each_way_of_decoding_is_asked_for_in_one_go():
    """An engine that starts anew for a draft starts once without one, once with it, once with the untrained one."""
    engine = Scripted()
    work = Workload(prompts=PROMPTS, sampling=GREEDY, other_temperature=0.7, concurrency=(1, 3))
    measure(engine, Path("trained"), work, Path("fresh"))
    plain = [(None, 0.0, 0, 2), (None, 0.7, 0, 2), (None, 0.0, 0, 2), (None, 0.0, 0, 3)]
    drafted = [("trained", temperature, 3, number) for _, temperature, _, number in plain]
    assert engine.asked == [*plain, *drafted, ("fresh", 0.0, 3, 2)]


def test_figures_of_a_pass_are_told_when_it_is_done_whatever_ends_the_next_one(caplog):
    class Killed(Scripted):
        def generate(self, prompts, sampling):
            if self.draft and sampling.temperature:
                raise KeyboardInterrupt
            return super().generate(prompts, sampling)

    caplog.set_level("INFO", "spec_trainer.measure.evaluation.measure")
    with pytest.raises(KeyboardInterrupt):
        measure(
            Killed(), Path("trained"), Workload(prompts=PROMPTS, sampling=GREEDY, other_temperature=1.0), None
        )
    done = [message for message in caplog.messages if message.startswith("done ")]
    assert [line.partition(":")[0] for line in done] == [
        "done decoding prompts (2) greedily without a draft",
        "done decoding prompts (2) at temperature 1 without a draft",
        "done decoding prompts (2) greedily with a draft (tokens of a round",
    ]
    assert "40 tokens, " in done[0]
    assert done[2].endswith(" tokens/s, tau 2.500")


def test_warm_up_is_neither_timed_nor_counted():
    engine = Scripted(warm_up_s=0.2)
    result = decode(engine, PROMPTS, GREEDY)
    assert engine.warm_ups == [replace(GREEDY, max_new_tokens=8)] * 2  # one prompt alone, and both
    assert engine.asked == [(None, 0.0, 3, 2)]
    assert result.counters == ROUND
    assert result.seconds < 0.1
    assert result.num_tokens == 40
    assert result.tokens_per_s == pytest.approx(40 / result.seconds)


def test_greedy_alone_needs_no_other_pass():
    engine = Scripted()
    document = measure(engine, Path("trained"), Workload(prompts=PROMPTS, sampling=GREEDY), None)
    assert engine.asked == [(None, 0.0, 0, 2), ("trained", 0.0, 3, 2)]
    assert document["acceptance_length_before"] is None
    assert document["sampled"] is None


def test_figures_at_the_top_are_those_of_the_temperature_asked_for():
    work = Workload(prompts=PROMPTS, sampling=replace(GREEDY, temperature=0.5), concurrency=(4,))
    engine = Scripted()
    document = measure(engine, Path("trained"), work, Path("fresh"))
    for key, value in document["sampled"].items():
        assert document[key] == value, key
    assert (document["temperature"], document["greedy"]["temperature"]) == (0.5, 0.0)
    assert document["acceptance_length"] == document["acceptance_length_before"] == 2.5
    assert document["acceptance_per_position"] == [0.8, 0.4, 0.3]
    assert (document["rounds"], document["drafted"], document["accepted"]) == (10, 30, 15)
    assert document["generated_tokens"] == 40
    assert document["outputs_equal"] is True
    assert [entry["concurrency"] for entry in document["throughput"]] == [4]
    assert engine.asked[-2] == ("trained", 0.5, 3, 4)


def test_gaps_that_cost_time_are_told_in_a_pass_of_their_own():
    engine = Scripted(always_tells_gaps=False)
    passes = decode_without_draft(engine, Workload(prompts=PROMPTS, sampling=GREEDY))
    assert engine.asked == [(None, 0.0, 0, 2)] * 2
    assert [answer.top2_margin for answer in passes.greedy.answers] == [(1.0,) * 20] * 2


def test_a_load_has_as_many_prompts_as_answers_at_once():
    work = Workload(prompts=[[1], [2], [3]], sampling=GREEDY)
    assert work.enough_for(2) == [[1], [2], [3]]
    assert work.enough_for(5) == [[1], [2], [3], [1], [2]]


def test_a_load_is_streamed_with_so_many_answers_at_once():
    engine = Scripted()
    decode_without_draft(engine, Workload(prompts=PROMPTS, sampling=GREEDY, concurrency=(1, 8)))
    assert Counter((sampling.concurrency, sampling.with_times) for sampling in engine.warm_ups) == {
        (None, False): 2,  # one prompt alone, and both
        (1, True): 1,
        (8, True): 5,  # 1, 2, 3, 4 and 8
    }


def test_prompts_by_length_are_benchmarks_from_short_to_long():
    lengths = [700, 3, 256, 257, 2048]
    work = Workload(
        prompts=[[place] * length for place, length in enumerate(lengths)],
        right=tuple("abcde"),
        sampling=GREEDY,
    ).by_length()
    assert [len(prompt) for prompt in work.prompts] == sorted(lengths)
    assert work.benchmarks == ("up to 256", "up to 256", "up to 512", "up to 1024", "up to 2048")
    assert work.right == tuple("bcdae")
    figures = measure(Scripted(), Path("draft"), replace(work, right=()), None)
    assert {name: row["prompts"] for name, row in figures["benchmarks"].items()} == {
        "up to 256": 2, "up to 512": 1, "up to 1024": 1, "up to 2048": 1,
    }  # fmt: skip
    assert Workload(prompts=[[1]], sampling=GREEDY).by_length().right == ()
