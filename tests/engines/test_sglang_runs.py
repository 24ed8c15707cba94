"""A whole training run whose engines are SGLang: one captures, another decodes and takes pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..integration import launching
from ..integration.launching import Lab, losses
from .sglang_here import ARGS, needs_sglang, sglang_environment  # noqa: F401 (a fixture)
from .test_vllm_runs import DECODING, STEPS, cycles, lengths

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang"),
    pytest.mark.slow,
]

SGLANG = {
    "engine__name": "sglang",
    "engine__batch_tokens": 64,
    "engine__dtype": "float32",
    "timeouts__peer_s": 300,
    **{f"engine__args__{key}": value for key, value in ARGS.items()},
}
LIMIT_S = 900.0


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_run_on_policy_does_what_one_with_the_reference_engine_does(llama: Path, tmp_path: Path) -> None:
    """The losses are equal only if both engines say of each token at which depth it was guessed."""
    rows = launching.write_rows(tmp_path / "rows.jsonl")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[1:9]))
    shared = {
        "target": llama,
        "data.path": few,
        "data.eval_path": few,
        "train.steps": STEPS,
        "train.schedule": "constant",
        "train.warmup_steps": 5,
        "draft.num_steps": 3,
        "decode.on_policy": True,
    }
    with_sglang, reference = tmp_path / "sglang", tmp_path / "hf"
    with Lab(tmp_path, shared, "") as lab:
        lab.train(with_sglang, timeout_s=LIMIT_S, **DECODING, **SGLANG)
        lab.train_here(reference, **DECODING)
    assert len(losses(with_sglang)) == STEPS
    assert losses(with_sglang) == pytest.approx(losses(reference), rel=1e-3)
    assert [cycle["draft_version"] for cycle in cycles(with_sglang)] == [0, STEPS // 2, STEPS]
    assert lengths(with_sglang) == pytest.approx(lengths(reference), abs=0.1)
