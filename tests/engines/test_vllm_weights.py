"""A run with the real vLLM notices that vLLM has loaded another head or embedding than the trainer reads."""

import pytest

from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine

from .conftest import VLLM_ARGS
from .vllm_here import needs_vllm
from .weights_of_engines import assert_other_weights_are_noticed

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lm_head.weight", "head"),
        pytest.param("model.embed_tokens.weight", "embedding", marks=pytest.mark.slow),
    ],
)
def test_weights_of_a_left_over_file_are_noticed(spawning, llama, vllm_context, tmp_path, name, what):
    config = VllmConfig(name="vllm", batch_tokens=64, kv_cache_bytes=64 << 20, args=VLLM_ARGS)
    assert_other_weights_are_noticed(
        lambda target: VllmEngine.create(config, target, vllm_context), llama, tmp_path, name, what
    )
