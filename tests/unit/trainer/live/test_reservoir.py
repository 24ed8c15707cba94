"""A reservoir keeps requests for one purpose each, within its bounds, and draws a cycle's samples."""

import numpy as np
import pytest
import torch

from spec_kit.live_traffic.live_requests import LiveRequest
from spec_trainer.configuration.follow import FollowConfig
from spec_trainer.data.dataset import Sample
from spec_trainer.live.reservoir import Reservoir

VOCABULARY, LONGEST = 5000, 12


def reservoir(**fields: object) -> Reservoir:
    return Reservoir(FollowConfig(**fields), longest=LONGEST, vocab_size=VOCABULARY, seed=1)


def request(number: int, answer: int = 7, length: int = 3) -> LiveRequest:
    return LiveRequest(prompt=[number, number // 2, 1], answer=[answer] * length)


def filled(num: int, **fields: object) -> Reservoir:
    kept = reservoir(**fields)
    for number in range(num):
        kept.add(request(number))
    return kept


def firsts(dataset) -> list[int]:
    return [int(sample.input_ids[0]) for sample in dataset.train]


def test_a_request_is_for_training_or_for_judging_and_never_both() -> None:
    kept = filled(1000, held_out=0.25, window=2000, passes=1000, replay=0.0)
    judged, trained = firsts(kept.held_out()), firsts(kept.draw((), 0))
    assert sorted(judged + trained) == list(range(1000))
    assert len(judged) == pytest.approx(250, abs=3 * (1000 * 0.25 * 0.75) ** 0.5)
    again = filled(1000, held_out=0.25, window=2000, passes=1000, replay=0.0)
    for number in range(1000):
        again.add(request(number, answer=8))
    assert sorted(firsts(again.held_out())) == judged
    assert sorted(firsts(again.draw((), 0))) == trained


def test_a_sample_is_supervised_in_its_answer() -> None:
    kept = filled(40, passes=9, replay=0.0)
    for sample in (*kept.draw((), 0).train, *kept.held_out().train):
        assert sample.input_ids.dtype == np.int32
        assert sample.input_ids.tolist()[3:] == [7, 7, 7]
        assert sample.loss_mask.tolist() == [False] * 3 + [True] * 3


def test_one_prompt_counts_once_with_its_newest_answer() -> None:
    kept = reservoir(held_out=1e-9, replay=0.0)
    for answer in range(50):
        kept.add(request(3, answer))
    kept.add(request(4))
    assert (kept.num_seen, kept.num_fresh, kept.left_out) == (51, 2, {"same_prompt": 49})
    assert {int(sample.input_ids[3]) for sample in kept.draw((), 0).train} == {49, 7}
    assert kept.num_fresh == 0


def test_what_is_of_no_use_is_counted() -> None:
    kept = reservoir(held_out=1e-9, replay=0.0)
    kept.add(LiveRequest(prompt=[VOCABULARY], answer=[1]))
    kept.add(LiveRequest(prompt=[1] * LONGEST, answer=[1]))
    kept.add(LiveRequest(prompt=[2] * (LONGEST - 1), answer=[1, 2, 3]))
    assert kept.left_out == {"other_vocabulary": 1, "long_prompt": 1}
    (sample,) = kept.draw((), 0).train
    assert sample.input_ids.tolist() == [2] * (LONGEST - 1) + [1]


def test_requests_with_tokens_of_images_are_left_out() -> None:
    kept = Reservoir(FollowConfig(held_out=1e-9), longest=9, vocab_size=VOCABULARY, seed=1, image_token_id=8)
    for prompt, answer in (([8, 2], [1]), ([1, 2], [8]), ([1, 2], [3])):
        kept.add(LiveRequest(prompt=prompt, answer=answer))
    assert (kept.left_out, kept.num_fresh) == ({"images": 2}, 1)


def test_both_are_bounded_and_keep_the_newest() -> None:
    kept = filled(1000, kept=50, window=8, passes=1000, replay=0.0)
    judged, trained = firsts(kept.held_out()), firsts(kept.draw((), 0))
    assert (len(judged), len(trained)) == (8, 50)
    assert judged == sorted(judged)
    assert min(trained) > 900
    assert min(judged) > 850


def test_recent_requests_are_drawn_more_often() -> None:
    kept = reservoir(held_out=1e-9, half_life=100, passes=1, replay=0.0)
    for number in range(1000):
        kept.add(request(number))
    counts = np.zeros(1000)
    for cycle in range(400):
        kept.num_fresh = 20
        counts[firsts(kept.draw((), cycle))] += 1
    newest, older = counts[900:].sum(), counts[800:900].sum()
    assert newest / older == pytest.approx(2, rel=0.15)  # one half-life apart
    assert counts[:200].sum() < 0.01 * counts.sum()


def test_a_share_of_the_data_is_replayed() -> None:
    replayed = [
        Sample(number, np.full(4, 4000 + number, dtype=np.int32), np.array([0, 1, 0, 1], dtype=bool))
        for number in range(100)
    ]
    kept = filled(60, held_out=1e-9, passes=1, replay=0.25)
    drawn = kept.draw(replayed, 0)
    ids = firsts(drawn)
    assert (len([one for one in ids if one < 4000]), len([one for one in ids if one >= 4000])) == (60, 20)
    assert [sample.sample_id for sample in drawn.train] == list(range(80))
    assert drawn.train[-1].loss_mask.tolist() == [False, True, False, True]
    other = filled(60, held_out=1e-9, passes=1, replay=0.25)
    assert firsts(other.draw(replayed, 1)) != ids
    assert firsts(filled(60, held_out=1e-9, passes=1, replay=0.25).draw(replayed, 0)) == ids


def test_a_request_without_finite_features_is_drawn_and_judged_by_no_more() -> None:
    kept = filled(40, held_out=0.5, passes=9)
    drawn, judged = kept.draw((), 0), kept.held_out()
    kept.leave_out(drawn, {0, 2})
    kept.leave_out(judged, {1})
    assert kept.left_out == {"not_finite": 3}
    gone = {firsts(drawn)[0], firsts(drawn)[2], firsts(judged)[1]}
    for number in range(40, 80):
        kept.add(request(number))
    left = firsts(kept.draw((), 1)) + firsts(kept.held_out())
    assert set(left) == set(range(80)) - gone


def states_of(num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens, dtype=torch.float32)[:, None, None].expand(num_tokens, 2, 4).contiguous()


def test_a_request_ends_where_the_states_of_its_server_end() -> None:
    kept = reservoir(held_out=1e-9)
    kept.add(LiveRequest(prompt=[1, 2], answer=[3, 4, 5]), states_of(4))
    kept.add(LiveRequest(prompt=[2] * (LONGEST - 1), answer=[1, 2, 3]), states_of(LONGEST + 1))
    kept.add(LiveRequest(prompt=[1], answer=[3]), "prefix_hit")
    drawn, found = kept.draw((), 0), kept.states()
    assert [sample.input_ids.tolist()[-2:] for sample in drawn.train] == [[3, 4], [2, 1]]
    for sample in drawn.train:
        assert torch.equal(found[sample.input_ids.tobytes()], states_of(len(sample)))
    assert (kept.num_seen, dict(kept.left_out)) == (3, {"prefix_hit": 1})


def test_the_bytes_of_states_are_bounded() -> None:
    kept = reservoir(held_out=0.3, states_bytes=10 * states_of(4).nbytes)
    for number in range(40):
        kept.add(LiveRequest(prompt=[number], answer=[1, 2, 3, 4]), states_of(4))
        assert sum(states.nbytes for states in kept.states().values()) <= 10 * states_of(4).nbytes
    everything = kept.kept
    assert sorted(one.number for one in (*everything.train, *everything.held_out)) == list(range(30, 40))
    assert kept.left_out == {"states_bytes": 30}
    small = reservoir(held_out=1e-9, states_bytes=states_of(4).nbytes - 1)
    small.add(LiveRequest(prompt=[1], answer=[1, 2, 3, 4]), states_of(4))
    assert (small.states(), small.kept.train, small.num_fresh) == ({}, (), 0)
