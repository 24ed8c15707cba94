"""Depths of tokens are noted round by round, whichever tokens a prefill yields between the rounds."""

from types import SimpleNamespace

from spec_engine_sglang.guess_depths import answer_depths, begin_answer, note_cap, note_verification


class Answer(SimpleNamespace):
    """A request of SGLang: tokens are sent with the values of the same slice."""

    def __init__(self, rid: str = "spec-generate-0-1") -> None:
        super().__init__(rid=rid, output_ids=[], customized_info=None, sent=0, received={})
        begin_answer(None, self)

    def prefill(self) -> None:
        self.output_ids.append(7)

    def verify(self, accepted: int, cap: int | None = None) -> None:
        note_verification(None, self, accepted)
        if cap is not None:
            note_cap(None, self, cap)
        self.output_ids += [7] * (accepted + 1)

    def send(self) -> None:
        sent, self.sent = self.sent, len(self.output_ids)
        for key, values in (self.customized_info or {}).items():
            self.received.setdefault(key, []).extend(values[sent : self.sent])

    def depths(self) -> list[int]:
        self.send()
        return list(answer_depths(self.received, len(self.output_ids)))


def test_each_round_begins_at_one() -> None:
    answer = Answer()
    answer.prefill()
    answer.send()
    answer.verify(0)
    answer.verify(2)
    answer.send()
    answer.verify(1)
    assert answer.depths() == [0, 1, 1, 2, 3, 1, 2]


def test_a_prefill_after_a_retraction_yields_a_token_that_was_not_guessed() -> None:
    answer = Answer()
    answer.prefill()
    answer.verify(1)
    answer.send()
    answer.prefill()
    answer.send()
    answer.prefill()  # retracted twice without a round between
    answer.send()
    answer.verify(1)
    assert answer.depths() == [0, 1, 2, 0, 0, 1, 2]


def test_an_answer_that_ends_in_a_prefill_has_all_depths() -> None:
    answer = Answer()
    answer.prefill()
    assert answer.depths() == [0]


def test_tokens_after_a_stop_are_not_sent() -> None:
    answer = Answer()
    answer.prefill()
    answer.verify(3)
    del answer.output_ids[3:]
    assert answer.depths() == [0, 1, 2]


def test_a_token_behind_the_verified_guesses_was_not_judged() -> None:
    """DSpark's draft may have only some of its guesses verified: here two of them, then none."""
    answer = Answer()
    answer.prefill()
    answer.verify(2, cap=3)
    answer.verify(0, cap=1)
    answer.verify(1, cap=3)
    assert answer.depths() == [0, 1, 2, 0, 0, 1, 2]


def test_requests_of_others_carry_nothing() -> None:
    answer = Answer("9f1c")
    answer.prefill()
    answer.verify(1, cap=2)
    assert answer.customized_info is None
    assert answer.depths() == []
