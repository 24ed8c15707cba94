"""Time products in fp8 on a GPU: quantisation of rows, and products with a weight, against bfloat16.

    python benchmarks/fp8_products.py    # JSON on stdout, seconds on an H100
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from measure import device_name, machine, timed, versions
from torch.nn import functional as F

from spec_core import Backend, LinearWeight, plugins
from spec_kit.drafting import Fp8Kernels, Fp8Weight
from spec_kit.drafting.fp8 import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {"the target's head": (2048, 4096, 151936), "the draft's head": (5734, 4096, 32000), "an MLP": (5734, 4096, 12288)}
"""Name -> rows, inputs and outputs, in the sizes of Qwen3-8B."""


def main() -> None:
    """Print the times of each shape."""
    options = _parse()
    plugin = plugins.load_available(Backend, options.backend)
    backend = plugin(plugin.Config(name=options.backend))
    device = backend.device(0)
    shapes = {name: (16, 32, 64) for name in SHAPES} if options.toy else SHAPES
    kernels = Fp8Kernels.of(backend.kernel)
    document = {
        "benchmark": "fp8_products",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "machine": machine(),
        "versions": versions("torch", "triton"),
        "shapes": {name: _measure(kernels, device, *shape) for name, shape in shapes.items()},
    }
    print(json.dumps(document, indent=2))


def _measure(kernels: Fp8Kernels, device: torch.device, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, grad = (torch.randn(rows, size, device=device, dtype=torch.bfloat16) for size in (inputs, outputs))
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    plain, fp8 = LinearWeight(weight), Fp8Weight(weight, kernels.quantize_rows)
    expected, got = plain.forward(x), fp8.forward(x)
    expected_back, got_back = plain.backward(grad), fp8.backward(grad)
    row_wise, values = F.ScalingType.RowWise, kernels.quantize_rows(x, FORWARD)
    other = kernels.quantize_rows(weight, FORWARD)

    def scaled(is_fast: bool) -> Callable[[], object]:
        scales = values[1], row_wise, other[1].T, row_wise
        return lambda: F.scaled_mm(
            values[0], other[0].T, *scales, output_dtype=torch.bfloat16, use_fast_accum=is_fast
        )

    calls: dict[str, Callable[[], object]] = {
        "bfloat16 forward": lambda: plain.forward(x),
        "bfloat16 backward": lambda: plain.backward(grad),
        "fp8 forward": lambda: fp8.forward(x),
        "fp8 backward": lambda: fp8.backward(grad),
        "quantize rows": lambda: kernels.quantize_rows(x, FORWARD),
        "quantize gradient": lambda: kernels.quantize_rows(grad, BACKWARD),
        "quantize weight": lambda: kernels.quantize_rows(weight, FORWARD),
        "quantize weight's columns": lambda: kernels.quantize_rows(weight.T.contiguous(), FORWARD),
        "product alone": scaled(False),
        "product alone, fast sums": scaled(True),
    }
    flops = 2 * rows * inputs * outputs
    times = {name: _ms(call, device) for name, call in calls.items()}
    rates = {name: flops / ms / 1e9 for name, ms in times.items() if "quantize" not in name}
    errors = {
        "forward": ((got - expected).norm() / expected.norm()).item(),
        "backward": ((got_back - expected_back).norm() / expected_back.norm()).item(),
    }
    return {"rows": rows, "inputs": inputs, "outputs": outputs, "ms": times, "tflops": rates, "error": errors}


def _ms(call: Callable[[], object], device: torch.device) -> float:
    def run() -> None:
        for _ in range(10):
            call()
        torch.get_device_module(device).synchronize()

    timed(run, 2)
    return timed(run, 5).summary()["wall_ms"] / 10


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cuda", help="backend plugin; default cuda")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, for the tests")
    return parser.parse_args()


if __name__ == "__main__":
    main()
