"""Counts by answer are the sums over whole answers, however their verifications alternate."""

import random

from spec_core.records import AcceptanceCounters
from spec_kit.hosting import AnswerCounts, AnswerRounds


def test_counts_are_sums_over_whole_answers():
    draw = random.Random(0)
    answers = [[draw.randint(0, 3) for _ in range(length)] for length in (1, 7, 3, 12)]
    counts = AnswerCounts()
    had = {}
    for step in range(12):
        for name, verifications in enumerate(answers):
            if step < len(verifications):
                had[name] = counts.add(had.get(name, AnswerRounds()), verifications[step])
    assert [tuple(had) for had in had.values()] == [(len(answer), sum(answer)) for answer in answers]
    assert counts.counted(3) == AcceptanceCounters(
        rounds=23,
        drafted=3 * 23,
        accepted=sum(map(sum, answers)),
        accepted_per_position=tuple(
            sum(accepted > position for answer in answers for accepted in answer) for position in range(3)
        ),
        answers=4,
        squared_rounds=sum(len(answer) ** 2 for answer in answers),
        squared_accepted=sum(sum(answer) ** 2 for answer in answers),
        rounds_times_accepted=sum(len(answer) * sum(answer) for answer in answers),
    )
