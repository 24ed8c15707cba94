"""Parts shared by all modules of tests that start the real vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spec_engine_vllm.engine import VllmEngine

_probed = VllmEngine.probe()

needs_vllm = [pytest.mark.engine, pytest.mark.skipif(not _probed.ok, reason=_probed.reason)]


def lives(process: psutil.Process) -> bool:
    """Dead ones may wait for whoever adopted them to take note."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def tokenized(target: Path, requests: list[dict], max_length: int = 512) -> list[dict]:
    """vLLM's answers to requests for the tokens of conversations (``vllm_tokenize.py``)."""
    command = [sys.executable, Path(__file__).with_name("vllm_tokenize.py"), target, str(max_length)]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
