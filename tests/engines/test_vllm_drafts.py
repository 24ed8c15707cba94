"""vLLM serves a draft as it was exported: the same text, the same guesses, the same acceptance."""

import json

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget
from spec_testing.answer_checks import KOLMOGOROV_LIMIT

from .conftest import NUM_DRAFT_TOKENS
from .replay import Replay
from .sampled_answers import kolmogorov_distances
from .trained_drafts import DRAFTS, NEW_TOKENS, Trained
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts")]

DRAFTED = SamplingParams(max_new_tokens=NEW_TOKENS, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)
PLAIN = SamplingParams(max_new_tokens=NEW_TOKENS, stop_at_eos=False)
# At temperature 1 this target's tokens are so evenly distributed that hardly any guess is accepted.
SAMPLED = SamplingParams(
    max_new_tokens=4, temperature=0.4, seed=3, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False
)


RARE = {"eagle3, two layers, window", "eagle3, mla", "dflash, reduced", "medusa", "mtp, experts"}
"""Drafts that are served each night only: two are for targets of their own, each with a vLLM of its own, one is a
third party's, and two differ from others in their layers or their head alone."""


@pytest.fixture(
    scope="module",  # the tests of one draft come one after the other, and share its vLLM
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in RARE else []) for name in sorted(DRAFTS)],
)
def trained(request, trained_draft) -> Trained:
    return trained_draft(request.param)


@pytest.mark.timeout(900)  # trains, starts vLLM, and decodes 5,000 tokens in two engines
def test_the_draft_is_served_with_the_acceptance_of_the_reference(trained, sharing_engine) -> None:
    """Greedy text with the draft is the plain greedy text, and both engines accept alike, over 5,000 tokens."""
    served = sharing_engine(trained.target)
    plain = served.generate(trained.prompts, PLAIN)
    assert sum(len(answer.token_ids) for answer in plain) >= 5000
    served.load_draft(trained.folder)
    drafted = served.generate(trained.prompts, DRAFTED)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(trained.target), context) as reference:
        reference.load_draft(trained.folder)
        replayed = reference.generate(trained.prompts, DRAFTED)
        expected, counted = reference.acceptance(), served.acceptance()
    print(f"{trained.name}: {expected=} {counted=}")
    assert expected.acceptance_length > 1.1  # Medusa has 1.2 here, the others more than 1.3
    assert counted.acceptance_length == pytest.approx(expected.acceptance_length, rel=0.02)
    assert counted.acceptance_per_position == pytest.approx(expected.acceptance_per_position, abs=0.02)
    assert [answer.guess_depths for answer in drafted] == [answer.guess_depths for answer in replayed]


def test_vllm_drafts_the_tokens_that_our_own_forward_pass_drafts(
    trained, sharing_engine, draft_notes
) -> None:
    served = sharing_engine(trained.target)
    served.load_draft(trained.folder)
    prompt = trained.prompts[0]
    served.generate([prompt], DRAFTED)  # vLLM has started
    already = len(draft_notes.read_text().splitlines())
    (answer,) = served.generate([prompt], DRAFTED)
    noted = [json.loads(line) for line in draft_notes.read_text().splitlines()[already:]]
    guesses = [tuple(drafts) for step in noted for drafts in step.values()]
    tokens = [*prompt, *answer.token_ids]
    replay = Replay(
        trained.target, trained.folder, len(prompt), tokens, TransformersTarget(trained.target).hidden(tokens)
    )
    steps = replay.steps(guesses)
    assert len(steps) >= 10
    assert [step.theirs for step in steps] == [step.ours for step in steps]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_thousand_sampled_answers_follow_the_targets_distribution(trained, sharing_engine) -> None:
    """The probability of all tokens likelier than the sampled one is uniform on [0, 1): Kolmogorov's test."""
    served, prompt = sharing_engine(trained.target), trained.prompts[0]
    served.load_draft(trained.folder)
    answers = served.generate([prompt] * 20_000, SAMPLED)
    assert served.acceptance().acceptance_length > 1.05
    texts = [answer.token_ids for answer in answers]
    distances = kolmogorov_distances(TransformersTarget(trained.target), prompt, texts, SAMPLED.temperature)
    print(f"{trained.name}: {distances}")
    assert max(distances) < KOLMOGOROV_LIMIT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_target_is_served_with_its_own_head(whole_target, trained_draft, sharing_engine) -> None:
    """Texts and acceptance are those of the target with the head as a draft of its own."""
    trained = trained_draft("mtp")
    apart, whole = sharing_engine(trained.target), sharing_engine(whole_target)
    apart.load_draft(trained.folder)
    whole.load_draft(whole_target)
    answers = [
        [answer.token_ids for answer in engine.generate(trained.prompts, DRAFTED)]
        for engine in (apart, whole)
    ]
    assert answers[0] == answers[1]
    assert whole.acceptance() == apart.acceptance()
