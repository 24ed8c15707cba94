"""A mark for tests that multiply in fp8 on the CPU, which torch before 2.13 does not do."""

import pytest

from spec_backend_cpu.backend import FP8_SINCE, CpuBackend

needs_fp8 = pytest.mark.skipif(
    not CpuBackend.capabilities().fp8, reason=f"torch before {FP8_SINCE} has no fp8 products on CPUs"
)
