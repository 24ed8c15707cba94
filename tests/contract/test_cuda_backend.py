"""The cuda backend keeps the contract, on a machine with a GPU. (Without one: tests/unit/backend_cuda.)"""

import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from spec_backend_cuda import mps_owner
from spec_backend_cuda.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_of_pieces,
    flash_attention_of_pieces_backward,
)
from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_backend_cuda.device_segment import DeviceSegment
from spec_core import Backend
from spec_core.errors import ConfigError
from spec_testing import BackendSuite
from spec_testing.conformance import run_python
from spec_testing.dense_attention import attention_reference

AVAILABILITY = CudaBackend.probe()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not AVAILABILITY.ok, reason=AVAILABILITY.reason),
    # A worker thread of autograd has no CUDA context before its first product; torch then makes one, and says so.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


class TestCudaBackend(BackendSuite):
    sdk_modules: ClassVar[tuple[str, ...]] = ("torch",)

    @pytest.fixture
    def backend(self) -> type[Backend]:
        return CudaBackend

    def host_traces(self) -> set[str]:
        """A daemon that has ended is listed until its parent looks; that is no trace."""
        folders = {str(folder) for folder in mps_owner.folders().glob("*spec-mps-*")}
        daemons = {
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/comm")
            if path.exists() and path.read_text().startswith("nvidia-cuda-mps") and _runs(path.parent)
        }
        return super().host_traces() | folders | daemons


def _runs(process: Path) -> bool:
    return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_probe_and_capabilities_open_no_context():
    code = (
        "import torch\nfrom spec_backend_cuda.backend import CudaBackend\n"
        "assert CudaBackend.probe().ok\nassert CudaBackend.capabilities().num_devices > 0\n"
        "print(torch.cuda.is_initialized())"
    )
    assert run_python(code).split() == ["False"]


def test_a_limit_that_does_not_fit_is_refused():
    backend = CudaBackend(CudaConfig(name="cuda"))
    device = backend.device(0)
    for wrong in (0.0, 1.5):
        with pytest.raises(ConfigError, match="fraction above 0"):
            backend.limit_memory(wrong)
    taken = torch.cuda.mem_get_info(device)[1] // 10
    torch.cuda.empty_cache()
    segment, descriptor = DeviceSegment.create(taken, device)
    os.close(descriptor)
    with pytest.raises(ConfigError, match=r"0\.95 of cuda:0.*placement\.trainer_fraction"):
        backend.limit_memory(0.95)
    before = torch.cuda.mem_get_info(device)[0]
    del segment
    assert torch.cuda.mem_get_info(device)[0] >= before + taken


@pytest.mark.parametrize("bounds", [[(0, 300)], [(0, 1), (1, 130), (130, 300)], [(3, 40), (50, 290)], []])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_fused_attention_equals_dense_attention(bounds, dtype, width):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(300, h, width, generator=generator).to(dtype) for h in (8, 2, 2, 8))
    wide = tuple(tensor.double().requires_grad_() for tensor in (q, k, v))
    out, lse = attention_reference(*wide, bounds)
    expected = torch.autograd.grad(out, wide, grad.double(), allow_unused=True, materialize_grads=True)
    device = torch.device("cuda", 0)
    q, k, v, grad = (tensor.to(device) for tensor in (q, k, v, grad))
    got_out, got_lse = flash_attention(q, k, v, bounds)
    assert got_lse.dtype == torch.float32
    got = flash_attention_backward(grad, (q, k, v, got_out, got_lse), bounds)
    tolerance = 3 * torch.finfo(dtype).eps
    for actual, reference in zip((got_out, *got), (out, *expected), strict=True):
        scale = max(1.0, reference.abs().max().item())
        assert (actual.cpu().double() - reference).abs().max().item() < tolerance * scale
    rows = [row for bound in bounds for row in range(*bound)]
    torch.testing.assert_close(got_lse.cpu().double()[rows], lse[rows], rtol=1e-3, atol=1e-3)
    outside = sorted(set(range(300)) - set(rows))
    assert not got_out[outside].any()


@pytest.mark.parametrize(
    "pieces", [[(0, 0, 40), (0, 260, 300)], [(0, 70, 130), (140, 140, 141), (140, 200, 300)]]
)
@pytest.mark.parametrize("width", [64, 128])
def test_fused_attention_of_pieces_equals_dense_attention(pieces, width):
    """The kernel aligns the causal mask of a piece to the last of its keys."""
    bounds = sorted(
        {(start, max(stop for other, _, stop in pieces if other == start)) for start, _, _ in pieces}
    )
    rows = [row for _, first, stop in pieces for row in range(first, stop)]
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(300, h, width, generator=generator).bfloat16() for h in (8, 2, 2, 8))
    wide = tuple(tensor.double().requires_grad_() for tensor in (q, k, v))
    out, lse = attention_reference(*wide, bounds)
    expected = list(torch.autograd.grad(out[rows], wide, grad[rows].double()))
    expected[0] = expected[0][rows]
    device = torch.device("cuda", 0)
    q, k, v, grad = (tensor.to(device) for tensor in (q[rows], k, v, grad[rows]))
    got_out, got_lse = flash_attention_of_pieces(q, k, v, pieces)
    got = flash_attention_of_pieces_backward(grad, (q, k, v, got_out, got_lse), pieces)
    tolerance = 3 * torch.finfo(torch.bfloat16).eps
    for actual, reference in zip((got_out, *got), (out[rows], *expected), strict=True):
        scale = max(1.0, reference.abs().max().item())
        assert (actual.cpu().double() - reference).abs().max().item() < tolerance * scale
    torch.testing.assert_close(got_lse.cpu().double(), lse[rows], rtol=1e-3, atol=1e-3)
