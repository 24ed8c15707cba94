"""EngineContext: what an engine in the application's process takes from it."""

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_kit.streams.inline_transport import InlineTransport


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
