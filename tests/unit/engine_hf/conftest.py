"""An HfEngine over a tiny target, and a receiver for what it captures."""

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import FeatureSchema
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.streams.inline_transport import InlineTransport
from spec_kit.targets.target_reader import read_target

CPU = CpuBackend(CpuBackend.Config())


@pytest.fixture
def open_engine():
    """``open_engine(folder, **config)``: an engine with an inline transport, closed after the test."""
    engines = []

    def open_one(folder, **config):
        context = EngineContext(backend=CPU, transport=InlineTransport())
        engines.append(HfEngine.create(HfConfig(**config), read_target(folder), context))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def plain_engine(tiny_llama):
    """An engine over the tiny Llama for tests that only decode; shared."""
    with HfEngine.create(HfConfig(), read_target(tiny_llama), EngineContext(backend=CPU)) as engine:
        yield engine


@pytest.fixture
def schema_of():
    def make(*layers, dtype="float32", hidden_size=32):
        return FeatureSchema(layers=layers, hidden_size=hidden_size, dtype=dtype)

    return make
