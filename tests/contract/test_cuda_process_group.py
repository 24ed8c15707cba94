"""NCCL over a rendezvous: the contract with a GPU per rank, and the refusal of two ranks on one."""

import contextlib
from collections.abc import Generator

import pytest
import torch

from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_core import ProcessGroup, Rendezvous
from spec_core.errors import ConfigError
from spec_testing import ProcessGroupSuite
from spec_testing.process_group_ranks import joined
from spec_testing.processes import Rank, run_ranks

AVAILABILITY = CudaBackend.probe()
NUM_DEVICES = CudaBackend.capabilities().num_devices
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABILITY.ok, reason=AVAILABILITY.reason)]


def build(rendezvous: Rendezvous) -> ProcessGroup:
    backend = CudaBackend(CudaConfig(name="cuda"))
    return backend.process_group(rendezvous, backend.device(rendezvous.rank))


def build_on_one_device(rendezvous: Rendezvous) -> ProcessGroup:
    backend = CudaBackend(CudaConfig(name="cuda"))
    return backend.process_group(rendezvous, backend.device(0))


@contextlib.contextmanager
def no_host_wait() -> Generator[None]:
    """torch raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_DEVICES < 2, reason=f"two GPUs are needed, this process sees {NUM_DEVICES}")
class TestNcclProcessGroup(ProcessGroupSuite):
    @pytest.fixture
    def build(self):
        return build

    @pytest.fixture
    def no_synchronisation(self):
        return no_host_wait


def meet_on_one_device(me: Rank) -> str:
    with joined(me) as rendezvous, pytest.raises(ConfigError) as refusal:
        build_on_one_device(rendezvous)
    return str(refusal.value)


def test_two_ranks_on_one_gpu_are_refused_with_the_remedy():
    for message in run_ranks(meet_on_one_device, 2):
        assert message.startswith("ranks 0 and 1 are both on GPU ")
        assert "placement.kind=colocated" in message
