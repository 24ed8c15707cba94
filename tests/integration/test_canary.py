"""The canary over what a server of vLLM counts: diverged and sane versions, one right after the other, under load."""

import random
import time
from types import SimpleNamespace

import pytest

from spec_core.records import AcceptanceCounters
from spec_engine_vllm.acceptance_counts import RoundCounter
from spec_trainer.push.canary import Canary

NUM_DRAFT_TOKENS = 3
ROUNDS = 400
SHARE = {"sane": 0.6, "diverged": 0.0}
"""How likely the next draft token is right."""


class LoadedServer:
    """A server whose answers keep what the draft has computed at their begin: a diverged one spoils all their rounds.

    ``lengths`` are those of the answers that run at any time; each that ends is followed by one like it.
    """

    def __init__(self, lengths: list[int], seed: int) -> None:
        self.serving = "sane"
        self.num_spoiled = 0
        """Verifications of answers that a diverged draft has spoiled, under a sane one."""
        self._draw = random.Random(seed)
        self._counter = RoundCounter(NUM_DRAFT_TOKENS)
        self._answers = {str(number): self._new_answer(length) for number, length in enumerate(lengths)}
        for _ in range(50):
            self._step()

    def serve(self, draft: str) -> None:
        """Commit or revert."""
        self.serving = draft
        self._counter.begin()

    def acceptance(self, rounds: int = 0, wait_s: float = 0.0) -> AcceptanceCounters:
        """Return what was counted when it is so much."""
        while self._counter.counted()["rounds"] < rounds:
            self._step()
        return AcceptanceCounters(**self._counter.counted())

    def _new_answer(self, length: int) -> SimpleNamespace:
        stats = SimpleNamespace(scheduled_ts=time.monotonic(), num_generation_tokens=0)
        return SimpleNamespace(stats=stats, length=length, begun_with=self.serving)

    def _step(self) -> None:
        for name, answer in list(self._answers.items()):
            if answer.stats.num_generation_tokens >= answer.length:
                del self._answers[name]
                self._answers[f"{name}+"] = self._new_answer(answer.length)
                continue
            answer.stats.num_generation_tokens += 1 + self._accepted(answer)
        self._counter.note(self._answers, has_verified=True)

    def _accepted(self, answer: SimpleNamespace) -> int:
        if answer.stats.num_generation_tokens == 0:
            return 0
        is_spoiled = answer.begun_with == "diverged" and self.serving == "sane"
        self.num_spoiled += is_spoiled
        share = SHARE["diverged"] if is_spoiled else SHARE[self.serving]
        found = 0
        while found < NUM_DRAFT_TOKENS and self._draw.random() < share:
            found += 1
        return found


@pytest.mark.parametrize("lengths", [[40] * 8, [40, 40, 700, 700, 700]], ids=["short", "mostly long"])
def test_its_verdict_is_right_20_of_20_times_each_way(lengths) -> None:
    server = LoadedServer(lengths, seed=0)
    canary = Canary({"a": server}, margin=0.1, rounds=ROUNDS)
    server.acceptance(ROUNDS)
    verdicts = []
    for pushed in ["diverged", "sane"] * 20:
        canary.look(["a"])
        server.serve(pushed)
        verdict = canary.judge(["a"])
        assert verdict is not None
        verdicts.append((pushed, verdict.has_fallen))
        if verdict.has_fallen:
            server.serve("sane")
    assert verdicts == [("diverged", True), ("sane", False)] * 20
    assert server.num_spoiled > 20 * 20
