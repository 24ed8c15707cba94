"""An HfEngine over a tiny target, and a receiver for what it captures."""

from __future__ import annotations

import pytest
import torch

from spec_core.cpu.inline_transport import InlineTransport
from spec_core.records import FeatureSchema
from spec_core.target_reader import read_target
from spec_trainer.engines.hf import HfConfig, HfEngine

CPU = torch.device("cpu")


@pytest.fixture
def open_engine():
    """``open_engine(folder, **config)``: an engine with an inline transport, closed after the test."""
    engines = []

    def open_one(folder, **config):
        engines.append(HfEngine(HfConfig(**config), read_target(folder), CPU, InlineTransport()))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def plain_engine(tiny_llama):
    """An engine over the tiny Llama for tests that only decode; shared."""
    with HfEngine(HfConfig(), read_target(tiny_llama), CPU) as engine:
        yield engine


@pytest.fixture
def schema_of():
    def make(*layers, dtype="float32", hidden_size=32):
        return FeatureSchema(layers=layers, hidden_size=hidden_size, dtype=dtype)

    return make
