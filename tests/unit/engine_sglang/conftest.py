"""Fixtures of the tests of the states that a server of SGLang captures."""

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
from tests.unit.engine_sglang.played_server import Server

from spec_engine_sglang import serving_capture
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE


@pytest.fixture
def start(monkeypatch, make_target) -> Callable[..., Server]:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, json.dumps({"share": 1.0, "states_bytes": 1 << 20}))
    monkeypatch.setattr(serving_capture, "_process", serving_capture._Process())
    message = SimpleNamespace(GetInternalStateReqOutput=SimpleNamespace)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", message)
    return lambda **arguments: Server(str(make_target("llama")), **arguments)
