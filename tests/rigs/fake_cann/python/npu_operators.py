"""torch-npu's fused operators on CPU tensors, as its own documentation (``_op_plugin_docs.py``) describes them.

Schemas, and which operator is the backward pass of which, are the genuine torch_npu's. What is excluded is an error.
"""

import torch
from torch import Tensor

FLOATS = torch.float16, torch.bfloat16, torch.float32


def refuse(operator: str, **limits: bool) -> None:
    """RuntimeError if a limit, named by its keyword, is not kept."""
    broken = [limit for limit, kept in limits.items() if not kept]
    if broken:
        raise RuntimeError(f"{operator}: not {', '.join(broken)} (error code 161002)")


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the norm in the dtype of ``x``, and the reciprocal root mean square, float32."""
    refuse(
        "npu_rms_norm",
        float_dtype=x.dtype in FLOATS,
        same_dtype=gamma.dtype == x.dtype,
        dimensions_1_to_8=1 <= x.dim() <= 8,
        gamma_has_the_last_dimension=gamma.shape == x.shape[-1:],
    )
    rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of gamma in float32."""
    normed, scaled = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normed).flatten(0, -2).sum(0)


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return r1 · x + r2 · (−second half of x, first half of x), in layout BSND only."""
    width = x.shape[-1]
    refuse(
        "npu_rotary_mul",
        half_mode=rotary_mode == "half" and rotate is None,
        float_dtype=x.dtype in FLOATS,
        same_dtype=r1.dtype == r2.dtype == x.dtype,
        four_dimensions=x.dim() == r1.dim() == 4 and r1.shape == r2.shape,
        even_width_below_896=width % 2 == 0 and 0 < width < 896,
        fewer_than_1000_batches_and_heads=x.shape[0] < 1000 and x.shape[2] < 1000,
        angles_1S1D_or_BS1D=r1.shape in {(batch, x.shape[1], 1, width) for batch in (1, x.shape[0])},
    )
    first, second = x.float().chunk(2, -1)
    return (r1.float() * x.float() + r2.float() * torch.cat([-second, first], -1)).to(x.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, and of the angles, which are not computed here."""
    first, second = (r2.float() * grad.float()).chunk(2, -1)
    dx = r1.float() * grad.float() + torch.cat([second, -first], -1)
    return dx.to(x.dtype), torch.full_like(r1, torch.nan), torch.full_like(r2, torch.nan)


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return silu(first half of x) · second half."""
    refuse("npu_swiglu", float_dtype=x.dtype in FLOATS, even_size=x.shape[dim] % 2 == 0)
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def npu_swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of x."""
    gate, up = x.float().chunk(2, dim)
    share = gate.sigmoid()
    of_gate = grad.float() * up * share * (1 + gate * (1 - share))
    return torch.cat([of_gate, grad.float() * gate * share], dim).to(x.dtype)


OPERATORS = {
    function.__name__: function
    for function in (
        *(npu_rms_norm, npu_rms_norm_backward, npu_rotary_mul, npu_rotary_mul_backward),
        *(npu_swiglu, npu_swiglu_backward),
    )
}
