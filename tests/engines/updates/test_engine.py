"""Fresh weights reach the draft of a vLLM that a run has started, or leave the old one."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spec_core.errors import EngineError
from spec_engine_vllm.engine import VllmEngine
from spec_kit.targets import read_target
from spec_kit.weight_sync import Publisher, PublishReport
from spec_testing.generating import generating

from ..vllm_here import needs_vllm
from .conftest import DRAFTED, DRAFTS, LIMIT_S, PROMPTS, weights_of

pytestmark = [*needs_vllm, pytest.mark.xdist_group("updates")]

NUM_PUSHES = 4
"""Pushes of each of two drafts, one a second."""
VERSIONS = itertools.count(1)
PUSHED_ONLY = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("eagle3, two layers, window", "eagle3, mla", "dflash, reduced", "mtp")
]
"""Drafts that only the test of many pushes has."""


@pytest.fixture(scope="module")
def publisher(trained, transports) -> Iterator[Publisher]:
    with Publisher(transports, read_target(trained.target).digest) as publisher:
        yield publisher


@pytest.fixture(scope="module")
def serving(vllm_environment, trained, worse, config, vllm_context, publisher) -> Iterator[VllmEngine]:
    """vLLM with the worse draft, known to the publisher."""
    with VllmEngine.create(config, read_target(trained.target), vllm_context) as engine:
        with pytest.raises(EngineError, match="has no draft whose weights"):
            engine.draft_replica()
        engine.load_draft(worse)
        with pytest.raises(EngineError, match="serves no draft now"):
            engine.draft_replica().status().result(LIMIT_S)
        engine.generate(trained.prompts[:1], DRAFTED)
        publisher.add(trained.name, engine.draft_replica()).result(LIMIT_S)
        yield engine
        publisher.remove(trained.name).result(LIMIT_S)


def push(publisher: Publisher, folder: Path) -> PublishReport:
    return publisher.publish(next(VERSIONS), weights_of(folder)).result(LIMIT_S)


@pytest.mark.timeout(900)  # trains, and starts two vLLMs
@pytest.mark.parametrize("trained", [*DRAFTS, *PUSHED_ONLY], indirect=True)
def test_pushes_every_second_change_what_is_drafted_and_no_answer(
    trained, worse, serving, sharing_engine, publisher, notes
) -> None:
    """After a push vLLM drafts as one does that was started with the same folder."""
    prompts = trained.prompts[PROMPTS]
    fresh = sharing_engine(trained.target)
    fresh.load_draft(trained.folder)
    fresh_texts, better = notes.drafted(fresh, prompts)
    texts, with_noise = notes.drafted(serving, prompts)
    assert texts == fresh_texts
    assert with_noise != better
    with generating(serving, prompts, DRAFTED) as rounds:
        for folder in (trained.folder, worse) * NUM_PUSHES:
            begun = time.monotonic()
            report = push(publisher, folder)
            assert report.committed, report
            status = publisher.serving()[trained.name]
            assert (status.state, status.version, status.digest) == (
                "committed",
                report.version,
                report.digest,
            )
            time.sleep(max(0.0, begun + 1.0 - time.monotonic()))
        while not rounds:  # on a busy machine all pushes may fall into one round; another one follows them
            time.sleep(0.1)
    assert len(rounds) > 1
    assert all(texts == fresh_texts for texts in rounds)
    assert notes.drafted(serving, prompts) == (fresh_texts, with_noise)
    report = push(publisher, trained.folder)
    assert report.committed
    assert notes.drafted(serving, prompts) == (fresh_texts, better)
    (answer,) = serving.generate(prompts[:1], DRAFTED)
    assert (answer.draft_version, answer.draft_digest) == (report.version, report.digest)
    assert len(notes.target_digests()) == 1


def test_a_revert_brings_back_what_was_served(trained, worse, serving, publisher, notes) -> None:
    prompts = trained.prompts[PROMPTS]
    assert push(publisher, trained.folder).committed
    before = notes.drafted(serving, prompts)
    assert push(publisher, worse).committed
    with_noise = notes.drafted(serving, prompts)
    assert with_noise[0] == before[0]
    assert with_noise[1] != before[1]
    publisher.revert().result(LIMIT_S)
    assert notes.drafted(serving, prompts) == before
    assert serving.acceptance().rounds > 0


def test_acceptance_counts_anew_from_a_commit(trained, worse, serving, publisher) -> None:
    assert push(publisher, trained.folder).committed
    serving.generate(trained.prompts[PROMPTS], DRAFTED)
    better = serving.acceptance()
    assert push(publisher, worse).committed
    assert serving.acceptance().rounds == 0
    serving.generate(trained.prompts[PROMPTS], DRAFTED)
    assert serving.acceptance().acceptance_length < better.acceptance_length


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda tensors: tensors.pop("fc.weight"), "lacks fc.weight", id="missing"),
        pytest.param(lambda tensors: tensors.update(more=torch.zeros(1)), "has more besides", id="besides"),
        pytest.param(
            lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), "expected float32", id="shape"
        ),
    ],
)
def test_an_update_that_does_not_fit_leaves_the_old_draft(
    trained, serving, publisher, notes, damage, problem
) -> None:
    prompts = trained.prompts[PROMPTS][:1]
    before = notes.drafted(serving, prompts)
    tensors = weights_of(trained.folder)
    damage(tensors)
    report = publisher.publish(next(VERSIONS), tensors).result(LIMIT_S)
    assert not report.committed
    assert problem in report.replicas[trained.name].reason
    assert notes.drafted(serving, prompts) == before


def test_damage_on_the_way_leaves_the_old_draft(
    trained, worse, serving, publisher, transports, notes, monkeypatch
) -> None:
    prompts = trained.prompts[PROMPTS][:1]
    before = notes.drafted(serving, prompts)
    send = transports["file"].sender

    def damaged(manifest, weights, *others):
        found = weights["fc.weight"].clone()
        found.view(torch.uint8)[-1, -1] ^= 1
        return send(manifest, {**weights, "fc.weight": found}, *others)

    monkeypatch.setattr(transports["file"], "sender", damaged)
    report = push(publisher, worse)
    assert not report.committed
    assert "fc.weight has arrived with digest" in report.replicas[trained.name].reason
    assert notes.drafted(serving, prompts) == before
    monkeypatch.undo()
    assert push(publisher, worse).committed


@pytest.mark.parametrize(("at", "is_after"), [(1, False), (2, True), (33, False), (45, True)])
def test_a_fault_in_the_midst_of_the_swap_leaves_the_old_draft(
    trained, worse, serving, publisher, notes, at, is_after
) -> None:
    """Eagle3's last ones are in packed weights; ``tests/unit/engine_vllm`` has every statement."""
    prompts = trained.prompts[PROMPTS][:1]
    assert push(publisher, trained.folder).committed
    before = notes.drafted(serving, prompts)
    notes.plant(at, is_after)
    report = push(publisher, worse)
    assert not report.committed
    assert f"planted at {at}" in report.replicas[trained.name].reason
    assert notes.drafted(serving, prompts) == before
    assert len(notes.target_digests()) == 1


def test_a_draft_that_is_half_of_each_ends_the_engine_with_its_cause(
    trained, worse, serving, publisher, notes
) -> None:
    """The last test of this vLLM."""
    notes.plant(20, True, True)
    report = push(publisher, worse)
    assert not report.committed
    with pytest.raises(EngineError, match="TornDraftError: the draft was left half exchanged: planted at 20"):
        serving.generate(trained.prompts[:1], DRAFTED)
