"""Engine ``hf`` gives the target's own text with a draft in blocks: the tests that DFlash2 and DSpark share."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from spec_backend_cpu.backend import CpuBackend
from spec_core import Draft, EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.drafting import write_draft
from spec_kit.streams.inline_transport import InlineTransport
from spec_kit.targets import read_target, read_target_tensors


def assert_follows_the_joint_distribution(
    answers: Sequence[Sequence[int]], folder: Path, prompt: Sequence[int]
) -> None:
    """Answers of three tokens by a target of four words are distributed as Transformers says."""
    counts, total, statistic = Counter(map(tuple, answers)), len(answers), 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for cell in itertools.product(range(4), repeat=3):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *cell]])).logits[0, 2:-1].double()
        p = torch.softmax(logits, -1)[range(3), list(cell)].prod()
        statistic += float((counts[cell] - total * p) ** 2 / (total * p))
    assert statistic < 112.0  # upper 1e-4 quantile of chi-square with 63 degrees of freedom


class DraftDecodingSuite:
    @pytest.fixture
    def draft(self) -> Draft:
        """The draft of greedy text; a subclass may have several."""
        raise pytest.UsageError("a DraftDecodingSuite needs a fixture 'draft'")

    @pytest.fixture
    def sampled(self) -> Draft:
        """The draft of sampled text."""
        raise pytest.UsageError("a DraftDecodingSuite needs a fixture 'sampled'")

    @pytest.fixture
    def drafting(self, tmp_path):
        """Engines with a draft of large random weights loaded, which are closed at the end."""
        engines = []

        def start(folder, draft):
            target, out = read_target(folder), tmp_path / "draft"
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

    def test_greedy_text_is_plain_decodings(self, make_target, drafting, draft):
        engine = drafting(make_target("qwen3"), draft)
        prompts = [(5, 9, 40), (7, 7), (61, 3, 3, 12, 50)]
        plain, drafted = (
            engine.generate(prompts, SamplingParams(max_new_tokens=16, num_draft_tokens=k, stop_at_eos=False))
            for k in (0, 3)
        )
        assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]

    def test_sampled_text_follows_the_target(self, make_target, drafting, sampled):
        """Three tokens of a four-word target against the exact joint distribution; the draft's is quite another."""
        folder = make_target("qwen3", vocab_size=4, num_hidden_layers=2, initializer_range=0.6)
        engine, prompt, total = drafting(folder, sampled), (1, 3, 0), 1000
        sampling = SamplingParams(
            max_new_tokens=3, temperature=1.0, num_draft_tokens=2, stop_at_eos=False, seed=4
        )
        answers = [answer.token_ids for answer in engine.generate([prompt] * total, sampling)]
        assert_follows_the_joint_distribution(answers, folder, prompt)
        assert 0.1 < engine.acceptance().acceptance_per_position[0] < 0.98
