"""A pass has no token that its engine adds after an end token."""

from dataclasses import replace

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets import read_target
from spec_trainer.workers.passes import decode

PROMPTS = [[5, 9, 2], [7, 7], [11, 3, 8, 1]]
SAMPLING = SamplingParams(max_new_tokens=12)


class DeafEngine(HfEngine):
    """An engine that goes on after end tokens."""

    def generate(self, prompts, sampling):
        return super().generate(prompts, replace(sampling, stop_at_eos=False))


@pytest.fixture
def engine(tiny_llama):
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with DeafEngine.create(HfConfig(name="hf"), read_target(tiny_llama), context) as engine:
        yield engine


def test_answers_have_no_token_after_an_end_token(engine):
    (first, *others) = engine.generate(PROMPTS, SAMPLING)
    end = first.token_ids[4]
    place = first.token_ids.index(end) + 1
    object.__setattr__(engine.target, "eos_token_ids", (end,))
    (cut, *_) = decode(engine, PROMPTS, SAMPLING).answers
    assert cut.token_ids == first.token_ids[:place]
    assert cut.top2_margin == pytest.approx(first.top2_margin[:place])
    assert decode(engine, PROMPTS, replace(SAMPLING, stop_at_eos=False)).texts == [
        answer.token_ids for answer in (first, *others)
    ]
