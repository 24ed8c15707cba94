"""The weight transports keep their contract on the CPU."""

import pytest

from spec_core import WeightTransportConfig
from spec_testing import BUCKET_BYTES, WeightTransportSuite, reference_backend
from spec_weight_transports.collective import CollectiveTransport
from spec_weight_transports.file import FileConfig, FileTransport
from spec_weight_transports.ipc import IpcWeightTransport


def file_transport():
    return FileTransport(FileConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


def collective_transport():
    return CollectiveTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


def ipc_transport():
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


class TestFileTransport(WeightTransportSuite):
    @pytest.fixture
    def build(self):
        return file_transport


class TestCollectiveTransport(WeightTransportSuite):
    @pytest.fixture
    def build(self):
        return collective_transport


class TestIpcTransport(WeightTransportSuite):
    @pytest.fixture
    def build(self):
        return ipc_transport
