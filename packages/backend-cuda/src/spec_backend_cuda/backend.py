"""CudaBackend is the backend for the NVIDIA GPUs of one host."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import time
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from spec_backend_cuda.allocator import allocator_settings, limit_memory
from spec_backend_cuda.mps import MpsUnavailable, mps_daemon, thread_percentage
from spec_backend_cuda.mps_owner import forget_events
from spec_backend_cuda.nccl_settings import nccl_settings
from spec_backend_cuda.nvml import DriverMissing, inventory
from spec_backend_cuda.visible_devices import gpu_of, gpus_visible_to_child, visible_gpus
from spec_core import Backend, BackendConfig, Placement, Role
from spec_core.errors import ConfigError, RunError
from spec_core.records import Availability, Capabilities
from spec_processes.sockets import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from spec_backend_cuda.mps import MpsDaemon
    from spec_backend_cuda.nvml import Gpu
    from spec_core import Kernel, ProcessGroup, Rendezvous, Transport

log = logging.getLogger(__name__)

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first GPUs with bfloat16 matrix products (Ampere)."""
FP8_SINCE = (8, 9)
"""Compute capability of the first GPUs with fp8 matrix products (Ada)."""
PROCESS_BYTES = 1536 << 20
"""Bytes of GPU memory that a process needs for the CUDA context, for kernels that are loaded at their first
call, for libraries' workspaces and for NCCL's buffers. Measured: vLLM 0.26 and a trainer before its first
step used 2.0 GiB together in addition to the memory that they counted (one H200, under MPS)."""


class CudaConfig(BackendConfig):
    """Section ``backend`` of a run on NVIDIA GPUs."""

    mps: Literal["auto", "required", "never"] = "auto"
    """Whether colocated processes use a GPU at the same time, through an MPS daemon of this run, or take
    turns. ``auto``: use MPS, or take turns with a warning if MPS does not work. ``required``: use MPS, or
    refuse the run. ``never``: take turns."""
    mps_threads: Literal["split", "shared"] = "shared"
    """Under MPS, ``shared``: each process may use all multiprocessors of the GPU. ``split``: each process
    uses only its share of the multiprocessors."""
    ipc: Literal["auto", "required", "never"] = "auto"
    """Whether processes on one GPU pass features through the GPU's memory. ``auto``: use the GPU's memory if
    the driver allows it, else host memory. ``never``: use host memory. ``required``: use the GPU's memory, or
    refuse the run if the driver does not allow it."""
    listen: str = Field(default="", pattern=r"^(\S+:\d+)?$")
    """``host:port`` at which this host's trainers listen for engines on other hosts (``disaggregated``); port
    0 means a free port for each trainer. If the option is empty, only engines on this host can connect."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, listen: str) -> str:
        if listen and parse_address(listen)[0] in ("0.0.0.0", "::"):
            raise ValueError(f"{listen} is every interface; name one by an address that other hosts reach")
        return listen


class CudaBackend(Backend):
    """NVIDIA GPUs of one host."""

    name: ClassVar[str] = "cuda"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[BackendConfig]] = CudaConfig
    dist_backend: ClassVar[str] = "nccl"
    device_type: ClassVar[str] = "cuda"

    config: CudaConfig

    def __init__(self, config: BackendConfig) -> None:
        """Store the configuration; nothing is started."""
        super().__init__(config)
        self._mps: MpsDaemon | None = None
        """This run's MPS daemon while ``prepare_host`` is open."""

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the backend, and if not, what to install (B2)."""
        versions, missing = _torch()
        try:
            found = inventory()
        except DriverMissing as error:
            missing.append(str(error))
        else:
            versions["driver"] = found.driver
            if not visible_gpus(os.environ, found.gpus):
                listed = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
                missing.append(
                    f"this process sees none of {len(found.gpus)} GPUs (CUDA_VISIBLE_DEVICES is {listed!r})"
                )
        return Availability(ok=not missing, reason="; ".join(missing), versions=versions)

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Return the capabilities of the GPUs (B3). All GPUs are assumed to be like the first visible GPU."""
        try:
            gpus = inventory().gpus
        except DriverMissing:
            return Capabilities(num_devices=0)
        entries = visible_gpus(os.environ, gpus)
        if not entries:
            return Capabilities(num_devices=0)
        first = gpu_of(entries[0], gpus)
        fp8 = first is None or first.compute_capability >= FP8_SINCE
        modern = first is None or first.compute_capability >= BFLOAT16_SINCE
        return Capabilities(
            device_ipc=True,
            memory_limit=True,
            graph_capture=True,
            dtypes=frozenset({"float32", "bfloat16"} if modern else {"float32"}),
            fp8=fp8,
            num_devices=len(entries),
            device_bytes=_smallest([gpu_of(entry, gpus) for entry in entries]),
            process_bytes=PROCESS_BYTES,
        )

    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        """Return the environment variables for a child process (B4).

        Within ``prepare_host`` they include the variables of an MPS client.
        """
        gpus = inventory().gpus
        cores = len(os.sched_getaffinity(0)) / max(1, len(visible_gpus(os.environ, gpus)))
        env = {
            **gpus_visible_to_child(os.environ, gpus, local_rank, num_devices),
            **allocator_settings(os.environ),
            **nccl_settings(os.environ),
            "OMP_NUM_THREADS": str(max(1, int(share * num_devices * cores))),
        }
        if self._mps:
            threads = thread_percentage(os.environ, share if self.config.mps_threads == "split" else 1)
            env |= {**self._mps.environment, **threads}
        return env

    @contextmanager
    def prepare_host(self, placement: Placement) -> Iterator[None]:
        """Start an MPS daemon if the placement shares GPUs, and stop it at the end (B5)."""
        started_s = time.time()
        with ExitStack() as stack:
            stack.callback(forget_events, started_s)  # also if there is no owner that does it
            if placement == "colocated" and self.config.mps != "never":
                self._mps = self._share_devices(stack)
            try:
                yield
            finally:
                self._mps = None

    def check_host(self) -> None:
        """Raise RunError if a daemon that ``prepare_host`` started has exited (B5)."""
        if self._mps is not None and self._mps.ended is not None:
            raise RunError(f"{self._mps.ended} died: the processes of a GPU computed through it (MPS)")

    def _share_devices(self, stack: ExitStack) -> MpsDaemon | None:
        try:
            return stack.enter_context(mps_daemon())
        except MpsUnavailable as unavailable:
            if self.config.mps == "required":
                raise ConfigError(
                    f"backend.mps=required, but {unavailable}; set backend.mps=auto to let processes take turns"
                ) from unavailable
            log.warning("engine and trainer take turns on each GPU: %s", unavailable)
            return None

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank and make it the current one (B6)."""
        import torch

        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def device_id(self, device: torch.device) -> str:
        """Return the GPU's UUID (B6)."""
        from spec_backend_cuda.device_sharing import gpu_id

        return gpu_id(device)

    def limit_memory(self, fraction: float) -> None:
        """Limit this process to ``fraction`` of the device's memory (B7)."""
        import torch

        limit_memory(fraction, torch.device("cuda", torch.cuda.current_device()))

    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        """Return collectives among the members of ``rendezvous`` (B8)."""
        from spec_backend_cuda.nccl_process_group import NcclProcessGroup

        return NcclProcessGroup(rendezvous, device)

    def group_settings(self) -> str:
        """Return NCCL's memory-allocation setting, in which all ranks of a communicator must agree (B8)."""
        return ",".join(f"{name}={value}" for name, value in nccl_settings(os.environ).items())

    def transport(self, placement: Placement) -> Transport:
        """Return the feature transport for a placement (B9)."""
        if placement == "inline":
            from spec_kit.streams import InlineTransport

            return InlineTransport()
        if placement == "disaggregated":
            from spec_backend_cuda.nccl_transport import NcclTransport

            return NcclTransport(self.config.listen)
        from spec_backend_cuda.device_sharing import CudaSharing
        from spec_kit.streams import IpcTransport

        ipc = self.config.ipc
        return IpcTransport(CudaSharing, share_device=ipc != "never", required=ipc == "required")

    def kernel(self, name: str) -> Kernel | None:
        """Return the kernel with this name, or None (B10)."""
        return self._kernels.get(name)

    @cached_property
    def _kernels(self) -> Mapping[str, Kernel]:
        from spec_backend_cuda.attention import KERNELS

        return {**KERNELS, **_triton_kernels()}


def _triton_kernels() -> Mapping[str, Kernel]:
    """Return the Triton kernels by name; an empty mapping without Triton or the C compiler that it needs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if importlib.util.find_spec("triton") is None or compiler is None:
        log.warning("drafts train in plain torch, more slowly: kernels need triton and a C compiler (gcc)")
        return {}
    from spec_backend_cuda.kernels import KERNELS

    return KERNELS


def _smallest(gpus: Sequence[Gpu | None]) -> int | None:
    """Return the memory of the smallest GPU in bytes; None if the memory of any GPU is unknown."""
    sizes = [None if gpu is None else gpu.memory_bytes for gpu in gpus]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(sizes) else None


def _torch() -> tuple[dict[str, str], list[str]]:
    """Return torch's version, and why it cannot use CUDA, without importing torch.

    The list of reasons is empty if torch can use CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}, ["torch is not installed: pip install torch"]
    version = metadata.version("torch")
    library = Path(next(iter(spec.submodule_search_locations)), "lib", "libtorch_cuda.so")
    missing = [] if library.exists() else [f"torch {version} is built without CUDA: install a build with it"]
    return {"torch": version}, missing
