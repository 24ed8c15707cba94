"""A receiver of the tests of shared memory."""

import pytest

from spec_kit.streams.shared_memory_transport import SharedMemoryTransport

from .small_samples import SCHEMA, WINDOW


@pytest.fixture
def receiver():
    with SharedMemoryTransport().listen(SCHEMA, WINDOW) as receiver:
        yield receiver
