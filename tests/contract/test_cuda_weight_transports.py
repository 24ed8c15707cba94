"""The weight transports keep their contract on GPUs: over the memory of one, through the host, and over NCCL."""

import pytest
import torch

from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_core import WeightTransportConfig
from spec_kit.weight_sync.digest import ROW_BYTES, tensor_digest
from spec_testing import WeightTransportSuite
from spec_testing.processes import run_ranks
from spec_testing.reference import reference_backend
from spec_testing.weight_faults import publish_damaged
from spec_testing.weight_stage import BUCKET_BYTES, WeightStage
from spec_weight_transports.collective import CollectiveTransport
from spec_weight_transports.file import FileConfig, FileTransport
from spec_weight_transports.ipc import IpcWeightTransport

AVAILABILITY = CudaBackend.probe()
NUM_DEVICES = CudaBackend.capabilities().num_devices
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABILITY.ok, reason=AVAILABILITY.reason)]


def backend_on(index, ipc="auto"):
    backend = CudaBackend(CudaConfig(name="cuda", ipc=ipc))
    backend.device(index)
    return backend


def over_the_gpu():
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(0, "required"))


def over_the_host():
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(0, "never"))


def from_the_cpu():
    """Return the transport of a publisher on the CPU, as ``spec-trainer push`` has by default."""
    return IpcWeightTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), reference_backend())


def through_a_folder():
    return FileTransport(FileConfig(bucket_bytes=BUCKET_BYTES), backend_on(0))


def to_the_second_gpu():
    return CollectiveTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(1))


def from_the_first_gpu():
    return CollectiveTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend_on(0))


class TestIpcTransport(WeightTransportSuite):
    @pytest.fixture
    def device(self):
        return "cuda"

    @pytest.fixture
    def build(self):
        return over_the_gpu


@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_DEVICES < 2, reason=f"two GPUs are needed, this process sees {NUM_DEVICES}")
class TestCollectiveTransport(WeightTransportSuite):
    @pytest.fixture
    def device(self):
        return "cuda"

    @pytest.fixture
    def build(self):
        return to_the_second_gpu

    @pytest.fixture
    def build_sender(self):
        return from_the_first_gpu

    @pytest.fixture
    def num_receivers(self):
        return 1  # NCCL takes each GPU once


@pytest.mark.parametrize(
    "stage",
    [
        WeightStage(over_the_host, "cuda"),
        WeightStage(through_a_folder, "cuda"),
        WeightStage(over_the_gpu, "cuda", from_the_cpu, publishes_from_cpu=True),
    ],
    ids=["over the host", "by files", "from the CPU"],
)
def test_through_the_host_what_arrives_is_whole_and_damage_is_never_served(stage):
    run_ranks(publish_damaged, 2, stage)


@pytest.mark.parametrize("size", [5, 4096, 3 * ROW_BYTES + 11, 300 * ROW_BYTES, (2 << 30) + 24])
def test_a_digest_is_that_of_the_cpu_also_beyond_what_32_bits_count(size):
    tensor = torch.randint(-128, 128, (size,), dtype=torch.int8)
    assert tensor_digest(tensor.to("cuda")) == tensor_digest(tensor)
