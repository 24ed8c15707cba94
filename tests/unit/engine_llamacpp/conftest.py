"""A target's GGUF file, and drafts of random weights for it."""

from pathlib import Path

import pytest

from spec_kit.targets import read_target
from spec_testing import draw_draft

from ...gguf_targets import write_target_gguf

PLAIN = {"fc_norm": False, "norm_output": False}
BLOCK = {"block_size": 4, "num_layers": 2, "num_features": 3}


@pytest.fixture(scope="session")
def own_gguf(tiny_llama, tmp_path_factory) -> Path:
    return write_target_gguf(tiny_llama, tmp_path_factory.mktemp("gguf") / "target.gguf")


@pytest.fixture
def draw(tiny_llama, tmp_path):
    def draw(algorithm: str, **options: object) -> Path:
        return draw_draft(tmp_path / "draft", read_target(tiny_llama), 0, algorithm, **options)

    return draw
