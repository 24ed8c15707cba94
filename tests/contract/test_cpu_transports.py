"""The two transports of the cpu backend: zero-copy in one process, shared memory between processes."""

import pytest

from spec_kit.streams.inline_transport import InlineTransport
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_testing import TransportSuite


class TestInlineTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return InlineTransport

    @pytest.fixture
    def in_process(self):
        return True


class FarTransport(SharedMemoryTransport):
    """As between two hosts: the sender knows no Unix socket of the receiver's name."""

    def listen(self, schema, window_bytes, host=""):
        return super().listen(schema, window_bytes, "127.0.0.1")

    def connect(self, address, schema, timeout_s):
        kind, name, rest = address.split(":", 2)
        return super().connect(f"{kind}:not-{name}:{rest}", schema, timeout_s)


class TestTransportBetweenHosts(TransportSuite):
    @pytest.fixture
    def build(self):
        return FarTransport


class TestSharedMemoryTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return SharedMemoryTransport
