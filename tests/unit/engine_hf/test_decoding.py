"""HfEngine.generate with hand-made proposers: greedy and sampled output, counters, what a proposer is given."""

import pytest
import torch
import transformers

from spec_core import Proposal, Proposer
from spec_core.errors import EngineError
from spec_core.records import SamplingParams
from spec_engine_hf import decoding
from spec_engine_hf.session import Session
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.quickstart.baselines import BigramModel, BigramProposer, PromptLookupProposer

from ..draft_decoding import assert_follows_the_joint_distribution

PROMPTS = [(5, 17, 3, 17, 3, 88), (40, 41, 42, 43, 40, 41, 42), (9,)]


class Scripted(Proposer):
    """Guesses from a known continuation, wrong wherever ``wrong`` says so for the round and position."""

    def __init__(self, prompt, continuation, wrong):
        self.text = [*prompt, *continuation, *([0] * 50)]
        self.wrong = wrong
        self.length = 1
        self.rounds = 0
        self.seen = []

    def extend(self, next_ids, hidden_TNH):
        self.seen.append((list(next_ids), hidden_TNH))
        self.length += len(next_ids)

    def propose(self, num_tokens, temperature, generator):
        ids = self.text[self.length : self.length + num_tokens]
        for position in self.wrong(self.rounds):
            ids[position] = (ids[position] + 1) % 97
        self.rounds += 1
        return Proposal(token_ids=tuple(ids))


def greedy(num_new, k=0, stop=False):
    return SamplingParams(max_new_tokens=num_new, num_draft_tokens=k, stop_at_eos=stop)


def generate_ids(engine, prompts, sampling):
    return [answer.token_ids for answer in engine.generate(prompts, sampling)]


@pytest.mark.parametrize("shape", ["llama", "gemma2", "gpt2"])
def test_plain_greedy_decoding_is_that_of_transformers(make_target, open_engine, shape):
    folder = make_target(shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt, answer in zip(PROMPTS, generate_ids(open_engine(folder), PROMPTS, greedy(20)), strict=True):
        expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert list(answer) == expected.tolist()


def plain_continuations(engine, num_new=24):
    return generate_ids(engine, PROMPTS, greedy(num_new))


def proposers(engine):
    answers = plain_continuations(engine)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return {
        "bigram of the answers": lambda: BigramProposer(BigramModel(texts, 97)),
        "bigram of noise": lambda: BigramProposer(BigramModel([list(range(97))], 97)),
        "prompt lookup": PromptLookupProposer,
    }


def test_greedy_output_with_any_proposer_equals_plain_decoding(make_target, open_engine):
    """Past Gemma's sliding window of 64. The contract's suite has a Qwen3, and the next test a GPT-2."""
    engine, length = open_engine(make_target("gemma2")), 70
    plain = generate_ids(engine, PROMPTS, greedy(length))
    for name, factory in proposers(engine).items():
        engine.use_proposer(factory)
        assert generate_ids(engine, PROMPTS, greedy(length, k=4)) == plain, name
        assert engine.acceptance().rounds > 0


def ragged_prompts(lengths=(58, 2, 31, 1, 20)):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("shape", ["gemma2", "gpt2"])
def test_sequences_side_by_side_are_decoded_as_one_by_one(make_target, open_engine, shape):
    """Sequences have many lengths, past Gemma's window, ending in different rounds; counters and places too."""
    found = {}
    for size in (1, 3):
        engine = open_engine(make_target(shape), max_num_seqs=size)
        engine.use_proposer(lambda: BigramProposer(BigramModel([list(range(97)), *ragged_prompts()], 97)))
        for k, temperature in ((0, 0.0), (3, 0.0), (3, 0.8)):
            sampling = SamplingParams(max_new_tokens=9, num_draft_tokens=k, temperature=temperature, seed=4)
            answers = engine.generate(ragged_prompts(), sampling)
            gaps = torch.tensor([gap for answer in answers for gap in answer.top2_margin])
            texts = [(answer.token_ids, answer.guess_depths) for answer in answers]
            found.setdefault(size, []).append((texts, engine.acceptance(), gaps))
    plain, drafted = ([token_ids for token_ids, _ in texts] for texts, *_ in found[1][:2])
    assert drafted == plain
    for (*alone, gaps), (*together, same_gaps) in zip(found[1], found[3], strict=True):
        assert alone == together
        torch.testing.assert_close(gaps, same_gaps, rtol=1e-3, atol=1e-3)


def test_near_ties_are_decided_by_the_text_alone(make_target, open_engine, monkeypatch):
    """Rounding of a batch must not decide: here it is made as large as the gaps between logits."""
    engine, prompts = open_engine(make_target("llama"), max_num_seqs=4), ragged_prompts()
    plain = generate_ids(engine, prompts, greedy(8))
    forward, noise = Session.forward, torch.Generator().manual_seed(0)

    def noisy(session, rows):
        logits, hidden = forward(session, rows)
        return logits + 0.1 * torch.randn(logits.shape, generator=noise), hidden

    monkeypatch.setattr(Session, "forward", noisy)
    assert generate_ids(engine, prompts, greedy(8)) != plain
    monkeypatch.setattr(decoding, "_NEAR_TIE", 0.2)
    assert generate_ids(engine, prompts, greedy(8)) == plain
    engine.use_proposer(PromptLookupProposer)
    assert generate_ids(engine, prompts, greedy(8, k=3)) == plain


def test_good_proposer_is_accepted_more_often_than_noise(plain_engine):
    lengths = {}
    for name, factory in proposers(plain_engine).items():
        plain_engine.use_proposer(factory)
        plain_engine.generate(PROMPTS, greedy(24, k=4))
        lengths[name] = plain_engine.acceptance().acceptance_length
    assert lengths["bigram of the answers"] > 1.5 > lengths["bigram of noise"] >= 1.0


def test_perfect_proposer_is_accepted_in_full(plain_engine):
    (answer,) = plain_continuations(plain_engine)[:1]
    plain_engine.use_proposer(lambda: Scripted(PROMPTS[0], answer, wrong=lambda _: ()))
    (found,) = plain_engine.generate(PROMPTS[:1], greedy(21, k=4))
    assert found.token_ids == answer[:21]
    counters = plain_engine.acceptance()
    # One token by the prefill, then five a round.
    assert (counters.rounds, counters.drafted, counters.accepted) == (4, 16, 16)
    assert counters.accepted_per_position == (4, 4, 4, 4)
    assert counters.acceptance_length == 5.0


def test_counters_follow_a_script_of_mistakes(plain_engine):
    """Mistakes at position 2, 0, none, 2, … of three: accepted 2, 0, 3, 2, …; later matches do not count."""
    script = [(2,), (0, 1), ()]
    (answer,) = plain_continuations(plain_engine)[:1]
    plain_engine.use_proposer(lambda: Scripted(PROMPTS[0], answer, wrong=lambda r: script[r % 3]))
    (found,) = plain_engine.generate(PROMPTS[:1], greedy(1 + 3 + 1 + 4 + 3, k=3))
    assert found.token_ids == answer[:12]
    counters = plain_engine.acceptance()
    assert (counters.rounds, counters.drafted, counters.accepted) == (4, 12, 7)
    assert counters.accepted_per_position == (3, 3, 1)
    assert counters.acceptance_per_position == [0.75, 0.75, 0.25]
    # Mistake, mistake, the token behind three accepted guesses, mistake; the first token is the prefill's.
    assert found.guess_depths == (0, 1, 2, 3, 1, 1, 2, 3, 0, 1, 2, 3)


def test_round_that_passes_the_maximum_length_counts_in_full(plain_engine):
    (answer,) = plain_continuations(plain_engine)[:1]
    plain_engine.use_proposer(lambda: Scripted(PROMPTS[0], answer, wrong=lambda _: ()))
    (found,) = plain_engine.generate(PROMPTS[:1], greedy(7, k=4))
    assert found.token_ids == answer[:7]
    assert (plain_engine.acceptance().rounds, plain_engine.acceptance().accepted) == (2, 8)


def test_empty_proposals_are_rounds_and_plain_decoding_counts_nothing(plain_engine):
    plain_engine.use_proposer(lambda: Scripted((1, 2), (), wrong=lambda _: ()))
    plain_engine.generate([PROMPTS[0]], greedy(5))
    assert plain_engine.acceptance().rounds == 0
    assert plain_engine.acceptance().acceptance_length == 1.0
    plain_engine.use_proposer(lambda: PromptLookupProposer(longest_ngram=0))
    plain_engine.generate([PROMPTS[0]], greedy(5, k=3))
    counters = plain_engine.acceptance()
    assert (counters.rounds, counters.drafted, counters.accepted_per_position) == (4, 0, ())


def test_counters_add_up_over_prompts_and_start_anew_with_a_new_proposer(plain_engine):
    plain_engine.use_proposer(PromptLookupProposer)
    plain_engine.generate(PROMPTS[:1], greedy(10, k=2))
    first = plain_engine.acceptance().rounds
    plain_engine.generate(PROMPTS[:1], greedy(10, k=2))
    assert plain_engine.acceptance().rounds == 2 * first
    plain_engine.use_proposer(PromptLookupProposer)
    assert plain_engine.acceptance().rounds == 0


def test_end_of_sequence_stops_and_is_emitted(open_engine, make_target):
    folder = make_target("llama")
    engine = open_engine(folder)
    (answer,) = plain_continuations(engine)[:1]
    stop = answer[6]
    cut = answer[: answer.index(stop) + 1]
    object.__setattr__(engine.target, "eos_token_ids", (96 if stop != 96 else 95, stop))
    engine.use_proposer(lambda: Scripted(PROMPTS[0], answer, wrong=lambda _: ()))
    for k in (0, 4):
        assert generate_ids(engine, PROMPTS[:1], greedy(20, k, stop=True)) == [cut]
        assert generate_ids(engine, PROMPTS[:1], greedy(20, k, stop=False)) == [answer[:20]]


def test_top2_margin_is_that_of_the_row_behind_each_token(plain_engine, tiny_llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    plain_engine.use_proposer(PromptLookupProposer)
    for k in (0, 3):
        (answer,) = plain_engine.generate(PROMPTS[1:2], greedy(15, k))
        text = [*PROMPTS[1], *answer.token_ids]
        with torch.no_grad():
            top = model(torch.tensor([text])).logits[0, len(PROMPTS[1]) - 1 : -1].topk(2).values
        expected = (top[:, 0] - top[:, 1]).tolist()
        assert answer.top2_margin == pytest.approx(expected, abs=1e-4)


def test_proposer_gets_the_targets_states_of_every_verified_position_once(plain_engine, tiny_llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    (answer,) = plain_continuations(plain_engine)[:1]
    made = []

    def factory():
        made.append(Scripted(PROMPTS[0], answer, wrong=lambda r: [(1,), (), (0,)][r % 3]))
        return made[-1]

    plain_engine.use_proposer(factory, layers=(2, 4))
    plain_engine.generate(PROMPTS[:1], greedy(15, k=3))
    (proposer,) = made
    next_ids = [token for ids, _ in proposer.seen for token in ids]
    hidden = torch.cat([states for _, states in proposer.seen])
    text = [*PROMPTS[0], *answer][: len(next_ids) + 1]
    assert next_ids == text[1:]
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.stack([states[2][0], states[4][0]], dim=1)[:-1]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_samples_follow_the_targets_distribution_and_the_seed_alone(make_target, open_engine):
    """Two tokens of a four-word target, by a draft with quite another distribution, against the exact joint one."""
    folder = make_target("llama", vocab_size=4, num_hidden_layers=1, initializer_range=0.6)
    engine = open_engine(folder)
    prompt, total = (1, 3, 0), 1000
    engine.use_proposer(lambda: BigramProposer(BigramModel([[0, 1, 2, 3, 0, 2, 1]], 4)))
    sampling = SamplingParams(
        max_new_tokens=3, temperature=1.0, num_draft_tokens=2, stop_at_eos=False, seed=3
    )
    answers = generate_ids(engine, [prompt] * total, sampling)
    assert generate_ids(engine, [prompt] * 50, sampling) == answers[:50]

    # The first token comes from the prefill; the draft's guesses decide the second and third.
    assert_follows_the_joint_distribution(answers, folder, prompt)
    assert 0.2 < engine.acceptance().acceptance_per_position[0] < 0.95


def test_draft_tokens_without_a_draft_are_refused(open_engine, tiny_llama):
    with pytest.raises(EngineError, match="no draft is loaded"):
        open_engine(tiny_llama).generate(PROMPTS, greedy(4, k=2))


def test_prompt_that_does_not_fit_is_refused(plain_engine, tiny_llama):
    longest = read_target(tiny_llama).max_positions
    for prompt in ((), (1,) * (longest - 3)):
        with pytest.raises(EngineError, match="does not fit"):
            plain_engine.generate([prompt], greedy(4))


def test_target_with_recurrent_layers_decodes_plainly_and_refuses_drafts(make_target, open_engine):
    sizes = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")}
    sizes |= {f"linear_{part}": 8 for part in ("key_head_dim", "value_head_dim")}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    engine = open_engine(make_target("qwen3_next", **sizes, **experts))
    engine.use_proposer(PromptLookupProposer)
    assert len(generate_ids(engine, PROMPTS[:1], greedy(4))[0]) == 4
    with pytest.raises(EngineError, match="linear_attention"):
        engine.generate(PROMPTS[:1], greedy(4, k=2))
