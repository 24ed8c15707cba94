"""Sequences side by side drop tokens, end and join: each one's logits are those of its text alone."""

import random

import pytest
import torch

from spec_engine_hf.hf_model import HfModel
from spec_engine_hf.session import Session
from spec_kit.targets.target_reader import read_target

ROUNDS = 18
NEW = 4


def text_of(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, 97) for _ in range(length)]


def assert_as_alone(model: HfModel, session: Session, texts: list[list[int]], rows: list[list[int]]) -> None:
    """Append each row to its text and compare the logits with those of the text alone."""
    logits_BRV, _ = session.forward(rows)
    for text, row, logits_RV in zip(texts, rows, logits_BRV, strict=True):
        text += row
        with torch.no_grad():
            alone_LV = model.causal_lm(torch.tensor([text]), use_cache=False).logits[0]
        torch.testing.assert_close(logits_RV, alone_LV[-NEW:].float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "gaps"), [("llama", True), ("gpt2", True), ("gemma2", False), ("mpt", False)]
)
def test_logits_are_those_of_each_text_alone(make_target, shape, gaps):
    draw = random.Random(7)
    model = HfModel(
        read_target(make_target(shape, max_position_embeddings=256)), torch.device("cpu"), "float32"
    )
    session, texts = model.session(), [text_of(draw, length) for length in (9, 1, 14)]
    session.prefill(texts)
    session.keep([1, 1, 1])
    most = 0
    for round_ in range(ROUNDS):
        assert_as_alone(model, session, texts, [text_of(draw, NEW) for _ in texts])
        counts = [draw.randint(1, NEW) for _ in texts]
        for text, count in zip(texts, counts, strict=True):
            del text[len(text) - NEW + count :]
        if round_ == 5:
            joining = [text_of(draw, length) for length in (3, 40)]
            session.prefill(joining)
            texts += joining
            counts += [1, 1]
        if round_ == 12:
            counts[1] = 0
        texts = [text for text, count in zip(texts, counts, strict=True) if count]
        session.keep(counts)
        own_BL = session._cache.own_BL
        assert own_BL.sum(dim=1).tolist() == [len(text) for text in texts]
        inside = own_BL.cummax(dim=1).values & ~own_BL
        most = max(most, int(inside.sum()))
    assert (most > 0) == gaps


def test_a_long_prompt_does_not_pad_the_others(make_target, monkeypatch):
    monkeypatch.setattr("spec_engine_hf.session._MOST_TOKENS", 100)
    draw, sizes = random.Random(7), []
    model = HfModel(read_target(make_target("llama")), torch.device("cpu"), "float32")
    model.causal_lm.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape))
    session, texts = model.session(), [text_of(draw, length) for length in (9, 1, 40)]
    session.prefill(texts)
    assert sizes == [(1, 9), (2, 40)]
    session.keep([1, 1, 1])
    assert_as_alone(model, session, texts, [text_of(draw, NEW) for _ in texts])
    sizes.clear()
    session.prefill([text_of(draw, length) for length in (3, 20)])
    assert sizes == [(2, 20)]
