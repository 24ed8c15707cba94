"""EngineContext: what an engine in the application's process takes from it. Engine: what it need not define."""

from pathlib import Path

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import Engine, EngineConfig, EngineContext
from spec_core.errors import ArtifactError
from spec_core.records import AcceptanceCounters
from spec_kit.streams.inline_transport import InlineTransport
from spec_testing.toy_target import toy_target


class LimitedBackend(CpuBackend):
    """Remembers the limits that were set."""

    def __init__(self) -> None:
        super().__init__(CpuBackend.Config())
        self.limits: list[float] = []

    def limit_memory(self, fraction: float) -> None:
        self.limits.append(fraction)


def test_a_claimed_device_is_limited_to_the_engines_share():
    backend = LimitedBackend()
    assert EngineContext(backend=backend).claim_device() == backend.device(0)
    assert backend.limits == []
    EngineContext(backend=backend, memory_fraction=0.4).claim_device()
    assert backend.limits == [0.4]


def test_the_transport_is_the_trainers_own_or_the_placements():
    backend, own = LimitedBackend(), InlineTransport()
    assert EngineContext(backend=backend).open_transport() is None
    assert EngineContext(backend=backend, placement="inline", transport=own).open_transport() is own
    across = EngineContext(backend=backend, placement="colocated").open_transport()
    assert type(across) is type(backend.transport("colocated"))


class PlainEngine(Engine):
    """Defines only what every engine has to define."""

    name = "plain"

    def start(self, schema): ...
    def capture(self, requests, schema): ...
    def generate_unordered(self, next_request, sampling): ...
    def health(self): ...
    def close(self): ...


def test_an_engine_that_defines_nothing_about_drafts_refuses_them(tmp_path):
    engine = PlainEngine.create(EngineConfig(), toy_target(tmp_path), EngineContext(backend=LimitedBackend()))
    with pytest.raises(
        ArtifactError, match=r"engine 'plain' decodes without a draft, so it cannot load my/draft"
    ):
        engine.load_draft(Path("my/draft"))
    assert engine.acceptance() == AcceptanceCounters()
