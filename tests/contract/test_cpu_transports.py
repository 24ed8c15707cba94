"""The two transports of the cpu backend: zero-copy in one process, shared memory between processes."""

from __future__ import annotations

import pytest

from spec_core.streams.inline_transport import InlineTransport
from spec_core.streams.shared_memory_transport import SharedMemoryTransport
from spec_core.testing import TransportSuite


class TestInlineTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return InlineTransport

    @pytest.fixture
    def in_process(self):
        return True


class TestSharedMemoryTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return SharedMemoryTransport
