"""Requests of many rows at once: later turns first, rows read as they are needed, seeds of row and turn."""

import itertools

from spec_core.records import Generation
from spec_trainer.measure.regeneration.row_requests import RowInProgress, RowRequests

ANSWER = Generation(token_ids=(7,))


class Turns:
    """A conversation of some turns, whose prompts are lists of its name and turn."""

    def __init__(self, name: int, turns: int) -> None:
        self.prompts = [[name, turn] for turn in range(turns)]

    @property
    def prompt(self) -> list[int]:
        return self.prompts[0] if self.prompts else []

    def take(self, token_ids, max_new_tokens) -> None:
        assert (token_ids, max_new_tokens) == ((7,), 9)
        self.prompts.pop(0)


def rows(*turns: int):
    for number, count in enumerate(turns):
        yield RowInProgress(number, {}, Turns(number, count))


def test_a_later_turn_comes_before_the_next_row_as_soon_as_its_first_is_answered():
    requests = RowRequests(rows(2, 1, 3), seed=0)
    first, second = requests.next_request(), requests.next_request()
    assert (first.prompt, second.prompt) == ([0, 0], [1, 0])
    assert requests.take(first, ANSWER, 9) is None
    assert requests.take(second, ANSWER, 9).number == 1
    follow, third = requests.next_request(), requests.next_request()
    assert (follow.prompt, third.prompt) == ([0, 1], [2, 0])
    assert requests.next_request() is None
    assert requests.take(third, ANSWER, 9) is None
    assert requests.next_request().prompt == [2, 1]
    assert requests.take(follow, ANSWER, 9).number == 0
    assert requests.next_request() is None


def test_seeds_depend_on_the_row_and_the_turn_alone():
    def seeds(turns, seed, at_once):
        requests, found, asked = RowRequests(rows(*turns), seed), {}, []
        while request := (requests.next_request() if len(asked) < at_once else None) or (
            asked and asked.pop()
        ):
            if (key := tuple(request.prompt)) in found:
                requests.take(request, ANSWER, 9)
            else:
                found[key] = request.seed
                asked.append(request)
        return found

    alone, together = seeds((2, 1, 3), 5, 1), seeds((2, 1, 3), 5, 3)
    assert alone == together
    assert len(set(alone.values())) == len(alone) == 6
    assert seeds((2, 1, 3), 6, 1) != alone


def test_rows_are_read_as_they_are_asked():
    read = []
    endless = (
        read.append(number) or RowInProgress(number, {}, Turns(number, 1)) for number in itertools.count()
    )
    requests = RowRequests(endless, seed=0)
    for _ in range(3):
        requests.next_request()
    assert read == [0, 1, 2]
