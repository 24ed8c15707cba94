"""The mark of every module of tests that starts the real vLLM."""

from __future__ import annotations

import pytest

from spec_trainer.engines.vllm.engine import VllmEngine

_probed = VllmEngine.probe()

needs_vllm = [pytest.mark.engine, pytest.mark.skipif(not _probed.ok, reason=_probed.reason)]
