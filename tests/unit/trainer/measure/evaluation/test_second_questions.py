"""Questions that follow the answer to another one."""

from types import SimpleNamespace

import pytest

from spec_core.errors import DataError
from spec_core.records import Generation, SamplingParams
from spec_trainer.data.tokens import Opening
from spec_trainer.measure.evaluation import benchmarks
from spec_trainer.measure.evaluation.benchmarks import Questions
from spec_trainer.measure.evaluation.measure import ask_all
from spec_trainer.measure.evaluation.workload import Workload


class Characters:
    """An encoder whose tokens are characters, and whose template is ``role:content|``."""

    def opening(self, chat, messages):
        text = "".join(f"{message['role'][0]}:{message['content']}|" for message in messages)
        return Opening(text, [ord(character) for character in text], None)

    def decode(self, ids):
        return "".join(map(chr, ids))


class Answering:
    """An engine that answers ``ok`` and an end token, and notes its prompts."""

    target = SimpleNamespace(eos_token_ids=(0,))

    def __init__(self):
        self.prompts = []

    def generate_unordered(self, next_request, sampling):
        assert (sampling.temperature, sampling.num_draft_tokens) == (0, 0)
        while request := next_request():
            self.prompts.append("".join(map(chr, request.prompt)))
            yield request, Generation(token_ids=(111, 107, 0))


def test_a_second_question_follows_the_answer_to_the_first():
    rows = [
        benchmarks.BenchmarkRow("mt_bench", "1", ["a", "b", "c"]),
        benchmarks.BenchmarkRow("mt_bench", "2", ["d"]),
    ]
    asked, engine = Questions(rows, Characters(), 50), Answering()
    work = Workload(prompts=asked.prompts, sampling=SamplingParams(max_new_tokens=3, temperature=0.5))
    work = ask_all(engine, work, asked)
    assert engine.prompts == ["u:a|", "u:a|a:ok|u:b|"]
    texts = ["".join(map(chr, prompt)) for prompt in work.prompts]
    assert texts == ["u:a|", "u:a|a:ok|u:b|", "u:a|a:ok|u:b|a:ok|u:c|", "u:d|"]
    assert work.benchmarks == ("mt_bench",) * 4


def test_a_second_question_is_asked_while_others_wait_for_their_first_answer():
    rows = [benchmarks.BenchmarkRow("mt_bench", str(number), ["a", "b", "c"]) for number in range(3)]
    asked = Questions(rows, Characters(), 50)
    first, second, third = (asked.next_request() for _ in range(3))
    assert asked.next_request() is None
    asked.take(second, (111,))
    assert "".join(map(chr, asked.next_request().prompt)) == "u:a|a:o|u:b|"
    assert asked.next_request() is None
    for request in (third, first):
        asked.take(request, (111,))
    assert asked.num_open == 3


def test_a_prompt_that_has_become_too_long_is_refused():
    asked = Questions([benchmarks.BenchmarkRow("mt_bench", "q:7", ["a", "b"])], Characters(), 10)
    work = Workload(prompts=asked.prompts, sampling=SamplingParams(max_new_tokens=3))
    with pytest.raises(
        DataError,
        match=r"q:7: turn 2 makes a prompt of 13 tokens; 1 to 10 are possible: leave .* or lower --max-new",
    ):
        ask_all(Answering(), work, asked)
