"""Parts shared by all modules of tests that start the real vLLM."""

import psutil
import pytest

from spec_engine_vllm.engine import VllmEngine

_probed = VllmEngine.probe()

needs_vllm = [pytest.mark.engine, pytest.mark.skipif(not _probed.ok, reason=_probed.reason)]


def lives(process: psutil.Process) -> bool:
    """Dead ones may wait for whoever adopted them to take note."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
