"""The weight transports keep their contract on the rig, with deferred streams."""

import pytest
from cards import free_card

from spec_backend_ascend.backend import AscendBackend
from spec_core import WeightTransportConfig
from spec_testing import WeightTransportSuite
from spec_testing.processes import run_ranks
from spec_testing.reference import reference_backend
from spec_testing.weight_faults import publish_damaged
from spec_testing.weight_stage import BUCKET_BYTES, WeightStage
from spec_weight_transports.collective import CollectiveTransport
from spec_weight_transports.file import FileConfig, FileTransport
from spec_weight_transports.ipc import IpcWeightTransport


def backend_on(card, ipc="auto"):
    backend = AscendBackend(AscendBackend.Config(name="ascend", ipc=ipc))
    backend.device(card)
    return backend


def collective_transport():
    return CollectiveTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(free_card()))


def over_the_card():
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(0, "required"))


def over_the_host():
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(0, "never"))


def from_the_cpu():
    """Return the transport of a publisher on the CPU, as ``spec-trainer push`` has by default."""
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


def file_transport():
    return FileTransport(FileConfig(bucket_bytes=BUCKET_BYTES), backend_on(0))


class RigSuite(WeightTransportSuite):
    @pytest.fixture
    def device(self):
        return "npu"


class TestCollectiveTransport(RigSuite):
    @pytest.fixture
    def build(self):
        return collective_transport


class TestIpcTransport(RigSuite):
    @pytest.fixture
    def build(self):
        return over_the_card


@pytest.mark.parametrize(
    "stage",
    [
        WeightStage(over_the_host, "npu"),
        WeightStage(file_transport, "npu"),
        WeightStage(over_the_card, "npu", from_the_cpu, publishes_from_cpu=True),
    ],
    ids=["over the host", "by files", "from the CPU"],
)
def test_through_the_host_what_arrives_is_whole_and_damage_is_never_served(stage):
    run_ranks(publish_damaged, 2, stage)
