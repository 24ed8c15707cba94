"""Answers of CudaBackend without a GPU."""

import io
import logging
import os

import pytest

from spec_backend_cuda import backend as module
from spec_backend_cuda import nvml
from spec_backend_cuda.allocator import allocator_settings
from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_backend_cuda.mps import MpsDaemon
from spec_backend_cuda.nvml import DriverMissing, Gpu, Inventory
from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_testing.conformance import run_python

TWO = Inventory("580.1", (Gpu("GPU-a", (9, 0)), Gpu("GPU-b", (9, 0))))


@pytest.fixture
def two_gpus(monkeypatch):
    """As on a host with two GPUs and no list of visible ones."""
    monkeypatch.setattr(module, "inventory", lambda: TWO)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_driver(monkeypatch):
    def absent() -> Inventory:
        raise DriverMissing("no NVIDIA driver was found")

    monkeypatch.setattr(module, "inventory", absent)


def cuda(**options: object) -> CudaBackend:
    return CudaBackend(validate(CudaConfig, {"name": "cuda", **options}, "backend"))


def test_probe_names_the_missing_driver(no_driver):
    availability = CudaBackend.probe()
    assert not availability.ok
    assert "no NVIDIA driver was found" in availability.reason
    assert CudaBackend.capabilities().num_devices == 0


def test_probe_names_a_torch_without_cuda(two_gpus, monkeypatch):
    monkeypatch.setattr(
        module, "_torch", lambda: ({"torch": "2.11.0"}, ["torch 2.11.0 is built without CUDA"])
    )
    availability = CudaBackend.probe()
    assert (availability.ok, availability.reason) == (False, "torch 2.11.0 is built without CUDA")
    assert availability.versions == {"torch": "2.11.0", "driver": "580.1"}


def test_probe_names_the_variable_that_hides_every_gpu(two_gpus, monkeypatch):
    monkeypatch.setattr(module, "_torch", lambda: ({"torch": "2.11.0"}, []))
    assert CudaBackend.probe().ok
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "sees none of 2 GPUs (CUDA_VISIBLE_DEVICES is '')" in CudaBackend.probe().reason
    assert CudaBackend.capabilities().num_devices == 0


def test_probe_and_capabilities_need_no_torch():
    code = (
        "from spec_backend_cuda.backend import CudaBackend\n"
        "print(CudaBackend.probe().reason)\nCudaBackend.capabilities()\nprint(sys.modules.get('torch'))"
    )
    reason, torch = run_python(code, blocked=["torch"]).splitlines()
    assert "torch is not installed: pip install torch" in reason
    assert torch == "None"


def test_without_a_driver_the_message_names_its_library_and_what_to_do(monkeypatch):
    monkeypatch.setattr(nvml.pynvml, "nvmlInit", find_no_library)
    with pytest.raises(DriverMissing, match=r"libnvidia-ml\.so\.1.*install"):
        nvml.inventory()


def find_no_library() -> None:
    raise nvml.pynvml.NVMLError(nvml.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_capabilities_come_from_the_devices_that_are_visible(two_gpus, monkeypatch):
    capabilities = CudaBackend.capabilities()
    assert capabilities.num_devices == 2
    assert capabilities.device_ipc
    assert capabilities.dtypes == {"float32", "bfloat16"}
    monkeypatch.setattr(module, "inventory", lambda: Inventory("1", (Gpu("GPU-a", (7, 5)),)))
    assert CudaBackend.capabilities().dtypes == {"float32"}


@pytest.mark.parametrize(
    ("sizes", "known"), [((80 << 30, 40 << 30), 40 << 30), ((80 << 30, None), None), ((None, None), None)]
)
def test_the_memory_of_a_device_is_that_of_the_smallest(monkeypatch, sizes, known):
    gpus = tuple(Gpu(f"GPU-{index}", (9, 0), size) for index, size in enumerate(sizes))
    monkeypatch.setattr(module, "inventory", lambda: Inventory("1", gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert CudaBackend.capabilities().device_bytes == known
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert CudaBackend.capabilities().device_bytes == sizes[0]


def test_a_child_sees_its_own_devices_and_its_share_of_the_cores(two_gpus):
    env = cuda().child_env("trainer", 0.5, 1)
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    cores = len(os.sched_getaffinity(0))
    assert env["OMP_NUM_THREADS"] == str(max(1, int(0.5 * cores / 2)))
    assert not any(name.startswith("CUDA_MPS") for name in env)
    assert cuda().child_env("engine", 1.0, 0, 2)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_every_process_shares_memory_over_nccl_in_the_same_way(two_gpus, monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert {cuda().child_env(role, 0.5, 0)["NCCL_CUMEM_ENABLE"] for role in ("engine", "trainer")} == {"-2"}
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert {cuda().child_env(role, 0.5, 0)["NCCL_CUMEM_ENABLE"] for role in ("engine", "trainer")} == {"0"}
    assert cuda().group_settings() == "NCCL_CUMEM_ENABLE=0"


def test_clients_of_the_runs_daemon_get_its_directories_and_their_share(two_gpus):
    backend = cuda(mps_threads="split")
    backend._mps = MpsDaemon({"CUDA_MPS_PIPE_DIRECTORY": "p", "CUDA_MPS_LOG_DIRECTORY": "l"}, io.StringIO())
    env = backend.child_env("engine", 0.35, 0)
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == "p"
    assert env["CUDA_MPS_LOG_DIRECTORY"] == "l"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "35"
    shared = cuda(mps_threads="shared")
    shared._mps = backend._mps
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in shared.child_env("engine", 0.35, 0)


def test_a_cap_that_the_environment_has_does_not_hold_for_clients_of_the_runs_daemon(two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    backend = cuda()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in backend.child_env("engine", 0.35, 0)
    backend._mps = MpsDaemon({"CUDA_MPS_PIPE_DIRECTORY": "p"}, io.StringIO())
    assert backend.child_env("engine", 0.35, 0)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"


@pytest.mark.parametrize(
    ("inherited", "settings"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "a:1"},
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:False",
                "PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:False",
            },
        ),
    ],
)
def test_inherited_expandable_segments_are_overridden_and_the_rest_stays(inherited, settings):
    assert allocator_settings(inherited) == settings


def test_without_mps_colocated_processes_take_turns_or_the_run_is_refused(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING), cuda().prepare_host("colocated"):
        pass
    assert "take turns on each GPU: nvidia-cuda-mps-control cannot be run" in caplog.text
    with (
        pytest.raises(ConfigError, match=r"backend\.mps=required, but nvidia-cuda-mps-control"),
        cuda(mps="required").prepare_host("colocated"),
    ):
        pass


@pytest.mark.parametrize(
    ("placement", "mps"), [("inline", "required"), ("disaggregated", "required"), ("colocated", "never")]
)
def test_mps_is_for_colocated_runs_that_want_it(placement, mps, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    with cuda(mps=mps).prepare_host(placement):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize("everywhere", ["0.0.0.0:0", "[::]:4711"])
def test_an_interface_that_others_could_not_be_told_of_is_refused(everywhere):
    with pytest.raises(ConfigError, match=r"listen: .* is every interface; name one"):
        cuda(listen=everywhere)
    assert cuda(listen="[::1]:0").config.listen == "[::1]:0"


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="mps"):
        cuda(mps="maybe")
