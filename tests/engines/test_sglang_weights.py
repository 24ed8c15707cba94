"""A run with the real SGLang notices that SGLang has loaded another head or embedding than the trainer reads."""

from __future__ import annotations

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core.engine import EngineContext
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine

from .sglang_here import ARGS, needs_sglang, sglang_environment  # noqa: F401 (a fixture)
from .weights_of_engines import assert_other_weights_are_noticed

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(600),
]


def test_weights_of_a_left_over_file_are_noticed(llama, tmp_path):
    config = SglangConfig(name="sglang", batch_tokens=64, dtype="float32", args=ARGS)
    context = EngineContext(
        backend=CpuBackend(CpuBackend.Config()), placement="colocated", start_s=400.0, peer_s=120.0
    )
    assert_other_weights_are_noticed(
        lambda target: SglangEngine.create(config, target, context),
        llama,
        tmp_path,
        "lm_head.weight",
        "head",
    )
