"""A whole training run whose engines are SGLang: one captures, another decodes and takes pushes."""

import pytest

from ..integration import launching
from ..integration.launching import Lab
from .sglang_here import ARGS, needs_sglang
from .test_vllm_runs import STEPS, assert_runs_as_the_reference

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
def test_a_run_on_policy_does_what_one_with_the_reference_engine_does(llama, tmp_path) -> None:
    keys = {
        "target": llama,
        "data.path": launching.write_rows(tmp_path / "rows.jsonl"),
        "train.steps": STEPS,
        "train.schedule": "constant",
        "train.warmup_steps": 5,
        "draft.num_steps": 3,
    }
    with Lab(tmp_path, keys, "") as lab:
        assert_runs_as_the_reference(lab, LIMIT_S, decode__on_policy=True, **SGLANG)
