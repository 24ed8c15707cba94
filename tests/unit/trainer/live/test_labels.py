"""Acceptance is told by the label of requests, whose number is bounded whatever servers say."""

import json

import pytest

from spec_core.errors import ProtocolError
from spec_kit.live_traffic.live_requests import LiveRequest
from spec_trainer.configuration.follow import FollowConfig
from spec_trainer.live.judge import DraftRounds
from spec_trainer.live.labels import MOST_LABELS, LabelCounts, lengths_by_label
from spec_trainer.live.reservoir import Reservoir


def test_each_label_has_the_tokens_of_its_own_requests() -> None:
    drafts = {
        "trained": DraftRounds((10, 20, 30), (5.0, 5.0, 10.0)),
        "served": DraftRounds((10, 20, 30), (10.0, 20.0, 10.0)),
    }
    assert lengths_by_label(drafts, ["b", "a", "b"]) == {
        "a": {"held_out": 1, "trained": 4.0, "served": 1.0},
        "b": {"held_out": 2, "trained": 40 / 15, "served": 2.0},
    }
    assert list(lengths_by_label(drafts, ["b", "a", "b"])) == ["a", "b"]


def test_labels_beyond_the_bound_are_others() -> None:
    counts = LabelCounts()
    names = [counts.add(f"label-{number}") for number in range(100_000)]
    assert names[:MOST_LABELS] == [f"label-{number}" for number in range(MOST_LABELS)]
    assert set(names[MOST_LABELS:]) == {"other"}
    assert counts.add("label-3") == "label-3"
    assert len(counts.requests) == MOST_LABELS + 1
    assert counts.requests["other"] == 100_000 - MOST_LABELS


def test_held_out_requests_keep_their_label() -> None:
    kept = Reservoir(FollowConfig(held_out=0.5), longest=12, vocab_size=5000, seed=1)
    for number in range(200):
        kept.add(LiveRequest(prompt=[number, 1], answer=[2], label="odd" if number % 2 else "even"))
    firsts = [int(sample.input_ids[0]) for sample in kept.held_out().train]
    assert kept.held_out_labels() == ["odd" if first % 2 else "even" for first in firsts]
    assert kept.labels.requests == {"odd": 100, "even": 100}


@pytest.mark.parametrize("label", ["", "x" * 65, "a b", "a\n", "ä", '"', "_a", 7, None])
def test_a_server_that_sends_another_label_is_not_believed(label) -> None:
    with pytest.raises(ProtocolError):
        LiveRequest.decode(json.dumps({"prompt": [1], "answer": [2], "label": label}))


def test_a_server_that_knows_no_labels_is_understood() -> None:
    assert LiveRequest.decode('{"prompt": [1], "answer": [2]}').label == "other"
