"""The weight transports keep their contract on the CPU."""

from __future__ import annotations

import pytest

from spec_core.testing import WeightTransportSuite
from spec_core.testing.reference import reference_backend
from spec_core.testing.weight_stage import BUCKET_BYTES
from spec_weight_transports.file import FileConfig, FileTransport


def file_transport():
    return FileTransport(FileConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


class TestFileTransport(WeightTransportSuite):
    @pytest.fixture
    def build(self):
        return file_transport
