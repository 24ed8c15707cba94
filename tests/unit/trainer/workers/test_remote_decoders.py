"""Decoders that answer when the test lets them."""

from pathlib import Path

import pytest

from spec_trainer.base.stop_request import Interrupted, StopRequest
from spec_trainer.workers.decoder import portions
from spec_trainer.workers.protocol import Generate, Generated, Serve
from spec_trainer.workers.remote_decoders import RemoteDecoders

PROMPTS = [[number] for number in range(40)]
"""Three portions."""


class Run:
    """Two decoders, of which the second one answers first; an answer is the prompt."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Serve | Generate]] = []
        self.waiting: list[tuple[str, Serve | Generate]] = []
        self.stop = StopRequest()
        self.stops_after = len(PROMPTS)
        self.decoders = RemoteDecoders(self, self.stop)
        self.decoders.names += "ab"

    def until(self, done) -> None:
        self.stop.requested = len(self.sent) == self.stops_after
        while not done():
            name, message = self.waiting.pop()
            if isinstance(message, Serve):
                self.decoders.served(name)
            else:
                answers = [(prompt, [1], [0, 1]) for prompt in message.prompts]
                rounds = len(answers)
                counters = {"rounds": rounds, "drafted": 2 * rounds, "accepted": rounds}
                self.decoders.generated(
                    name, Generated(answers, {**counters, "accepted_per_position": [rounds, 0]}, 0.5)
                )

    def send(self, name: str, message: Serve | Generate) -> None:
        self.sent.append((name, message))
        self.waiting.append((name, message))


def test_answers_are_in_the_order_of_the_prompts_whoever_gives_them():
    run = Run()
    decoded = run.decoders.answer(PROMPTS, seed=5)
    assert [list(answer.token_ids) for answer in decoded.answers] == PROMPTS
    assert all(answer.guess_depths == (1,) for answer in decoded.answers)
    assert (decoded.seconds, decoded.acceptance_length_per_request) == (1.5, 2)
    assert (decoded.counters.rounds, decoded.counters.accepted_per_position) == (40, (40, 0))
    assert [(name, message.prompts, message.seed) for name, message in run.sent] == [
        (name, portion.prompts, portion.seed)
        for name, portion in zip("abb", portions(PROMPTS, 5), strict=True)
    ]


def test_every_decoder_serves_a_draft_before_anything_goes_on():
    run = Run()
    run.decoders.serve(3, Path("/draft"))
    assert not run.waiting
    assert run.sent == [("a", Serve(3, "/draft")), ("b", Serve(3, "/draft"))]


def test_asked_to_stop_it_waits_for_the_portions_under_way_and_sends_no_more():
    run = Run()
    run.stops_after = 2
    with pytest.raises(Interrupted, match="the same command continues there"):
        run.decoders.answer(PROMPTS, seed=5)
    assert (len(run.sent), run.waiting) == (2, [])
