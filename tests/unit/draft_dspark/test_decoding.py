"""Engine ``hf`` gives the target's own text with this draft, greedy and sampled."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import transformers

from spec_backend_cpu.backend import CpuBackend
from spec_core.engine import EngineContext
from spec_core.records import SamplingParams
from spec_draft_dspark.draft import DSparkDraft
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.drafting import write_draft
from spec_kit.streams.inline_transport import InlineTransport
from spec_kit.targets import read_target, read_target_tensors

from .cases import make_config

HEADS = ["vanilla", "gated", "rnn"]


@pytest.fixture
def drafting(tmp_path):
    """Engines with a draft of large random weights loaded, which are closed at the end."""
    engines = []

    def start(folder, head):
        target, out = read_target(folder), tmp_path / "draft"
        draft = DSparkDraft(make_config(block_size=3, markov_head=head, layers=(1,)))
        torch.manual_seed(1)
        module = draft.build(target, read_target_tensors(target), None)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        out.mkdir()
        write_draft(draft, module.state_dict(), target, out)
        context = EngineContext(backend=CpuBackend(CpuBackend.Config()), transport=InlineTransport())
        engine = HfEngine.create(HfConfig(name="hf", dtype="float32", max_num_seqs=64), target, context)
        engines.append(engine)
        engine.load_draft(out)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("head", HEADS)
def test_greedy_text_is_plain_decodings(make_target, drafting, head):
    engine = drafting(make_target("qwen3"), head)
    prompts = [(5, 9, 40), (7, 7), (61, 3, 3, 12, 50)]
    plain, drafted = (
        engine.generate(prompts, SamplingParams(max_new_tokens=16, num_draft_tokens=k, stop_at_eos=False))
        for k in (0, 3)
    )
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]


def test_sampled_text_follows_the_target(make_target, drafting):
    """Three tokens of a four-word target against the exact joint distribution; the draft's is quite another.

    Other heads draw in the same way; ``test_proposer`` compares the probabilities of each with the forward pass.
    """
    folder = make_target("qwen3", vocab_size=4, num_hidden_layers=2, initializer_range=0.6)
    engine, prompt, total = drafting(folder, "rnn"), (1, 3, 0), 1000
    sampling = SamplingParams(
        max_new_tokens=3, temperature=1.0, num_draft_tokens=2, stop_at_eos=False, seed=3
    )
    counts = Counter(tuple(answer.token_ids) for answer in engine.generate([prompt] * total, sampling))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    statistic = 0.0
    for cell in itertools.product(range(4), repeat=3):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *cell]])).logits[0, 2:-1].double()
        p = torch.softmax(logits, -1)[range(3), list(cell)].prod()
        statistic += float((counts[cell] - total * p) ** 2 / (total * p))
    assert 0.1 < engine.acceptance().acceptance_per_position[0] < 0.98
    assert statistic < 112.0  # upper 1e-4 quantile of chi-square with 63 degrees of freedom
