"""Parts shared by all modules of tests that start the real SGLang on a CPU.

Everything of SGLang runs but its kernel library, whose packages are CUDA builds: ``tests/rigs/fake_sgl_kernel``
stands in for it, and for two packages that SGLang imports for nothing that runs here.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext, TargetSpec
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine

STANDS_IN_FOR = "0.5.23"
ARGS = {
    "device": "cpu", "prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx",
    "sampling_backend": "pytorch", "disable_cuda_graph": True, "disable_radix_cache": True, "sleep_on_idle": True,
    "max_total_tokens": 8192, "max_running_requests": 16, "mem_fraction_static": 0.3,
}  # fmt: skip


def _reason() -> str:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return SglangEngine.probe().reason
    return "" if found == STANDS_IN_FOR else f"SGLang {found}; the stand-in is for {STANDS_IN_FOR}"


needs_sglang = [pytest.mark.engine, pytest.mark.skipif(bool(_reason()), reason=_reason())]


def new_sglang(target: TargetSpec, batch_tokens: int = 64, **args: object) -> SglangEngine:
    """Return an engine with an SGLang on the CPU, float32; it starts when it is first asked."""
    context = EngineContext(
        backend=CpuBackend(CpuBackend.Config()), placement="colocated", start_s=240.0, peer_s=60.0
    )
    config = SglangConfig(name="sglang", dtype="float32", batch_tokens=batch_tokens, args=ARGS | args)
    return SglangEngine.create(config, target, context)
