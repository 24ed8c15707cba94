"""The judge of sampled answers separates a wrong sampler from the rounding of logits."""

from pathlib import Path

import pytest
import torch

from spec_testing import TransformersTarget
from spec_testing.answer_checks import KOLMOGOROV_LIMIT

from .sampled_answers import kolmogorov_distances, own_distances

PROMPT, NUMBER, TEMPERATURE, LENGTH = [5, 3, 9, 11], 2000, 0.4, 2


@pytest.fixture(scope="module")
def target(make_target) -> TransformersTarget:
    return TransformersTarget(make_target("llama", hidden_size=64, head_dim=32, initializer_range=0.25))


def sampled(target: TransformersTarget, folder: Path, rounding: float, fault: float) -> list[list[int]]:
    """Sample answers as a server would, and record its logits.

    The logits are multiples of ``rounding``. A faulty sampler takes the likeliest token for a part of the answers.
    """
    draw = torch.Generator().manual_seed(0)
    answers = torch.zeros(NUMBER, 0, dtype=torch.long)
    steps = []
    for _ in range(LENGTH):
        tokens = torch.cat([torch.tensor([PROMPT] * NUMBER), answers], 1)
        with torch.no_grad():
            logits = target.model(tokens).logits[:, -1]
        raw = (logits / rounding).round() * rounding
        new = torch.multinomial((raw / TEMPERATURE).softmax(-1), 1, generator=draw)
        greedy = torch.rand(NUMBER, 1, generator=draw) < fault
        new = torch.where(greedy, raw.argmax(-1, keepdim=True), new)
        answers = torch.cat([answers, new], 1)
        steps.append(
            {
                "requests": [str(i) for i in range(NUMBER)],
                "starts": list(range(NUMBER)),
                "raw": raw,
                "tokens": new,
                "counts": torch.ones(NUMBER, dtype=torch.int32),
            }
        )
    folder.mkdir()
    torch.save(steps, folder / "0.pt")
    return answers.tolist()


def test_exact_sampling_from_exact_logits_passes(target, tmp_path) -> None:
    answers = sampled(target, tmp_path / "server", rounding=1e-6, fault=0.0)
    own = own_distances(target, PROMPT, tmp_path / "server", TEMPERATURE, LENGTH)
    assert max(own["raw"]) < KOLMOGOROV_LIMIT
    assert max(own["computed"]) < 0.1
    assert max(kolmogorov_distances(target, PROMPT, answers, TEMPERATURE)) < KOLMOGOROV_LIMIT


def test_exact_sampling_from_rounded_logits_fails_by_as_much_as_the_logits_are_off(target, tmp_path) -> None:
    answers = sampled(target, tmp_path / "server", rounding=0.7, fault=0.0)
    own = own_distances(target, PROMPT, tmp_path / "server", TEMPERATURE, LENGTH)
    distances = kolmogorov_distances(target, PROMPT, answers, TEMPERATURE)
    assert max(own["raw"]) < KOLMOGOROV_LIMIT < max(own["computed"])
    for seen, computed in zip(distances, own["computed"], strict=True):
        assert abs(seen - computed) < KOLMOGOROV_LIMIT


def test_a_wrong_sampler_fails_on_the_servers_own_logits(target, tmp_path) -> None:
    sampled(target, tmp_path / "server", rounding=1e-6, fault=0.5)
    own = own_distances(target, PROMPT, tmp_path / "server", TEMPERATURE, LENGTH)
    assert min(own["raw"]) > KOLMOGOROV_LIMIT
