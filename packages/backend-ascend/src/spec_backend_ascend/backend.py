"""AscendBackend is the backend for the Huawei NPUs of one host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from spec_backend_ascend import host
from spec_backend_ascend.visible_devices import card_id, npus_visible_to_child
from spec_core import Backend, BackendConfig, Placement, Role
from spec_core.errors import ConfigError, PluginUnavailable
from spec_core.records import Availability, Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from spec_core import Kernel, ProcessGroup, Rendezvous, Transport

ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
EXEC_TIMEOUT_UNIT_S = 68
"""Unit of HCCL_EXEC_TIMEOUT, in seconds: HCCL rounds it down to a multiple of this number."""


class AscendConfig(BackendConfig):
    """Section ``backend`` of a run on NPUs.

    Environment variables that are already set are not changed. The only exception is the allocator's setting
    ``expandable_segments``. It is turned off, because memory in such segments cannot be shared with another
    process.
    """

    ipc: Literal["auto", "required", "never"] = "auto"
    """Whether processes on one card pass features through the card's memory. ``auto``: use the card's memory
    if driver and CANN are new enough, else host memory. ``never``: use host memory. ``required``: use the
    card's memory with any versions, and refuse the run if it cannot be shared."""
    allocator: str = "expandable_segments:False"
    """Value of PYTORCH_NPU_ALLOC_CONF. If it does not mention expandable segments, vllm-ascend turns them
    on."""
    task_queue: Literal[0, 1, 2] = 1
    """Value of TASK_QUEUE_ENABLE, which selects how torch_npu passes operators to the device."""
    hccl_connect_timeout_s: int = Field(600, ge=120, le=7200)
    """Value of HCCL_CONNECT_TIMEOUT: maximum seconds for which ranks wait for each other when a group is
    made."""
    hccl_exec_timeout_s: int = Field(1836, ge=EXEC_TIMEOUT_UNIT_S, le=17340)
    """Value of HCCL_EXEC_TIMEOUT: maximum duration of a collective, in seconds. HCCL rounds it down to a
    multiple of 68."""
    hccl_buffer_mb: int = Field(200, ge=1)
    """Value of HCCL_BUFFSIZE, in MiB. Every communicator uses twice this much device memory."""


class AscendBackend(Backend):
    """Huawei NPUs of one host."""

    name: ClassVar[str] = "ascend"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[BackendConfig]] = AscendConfig
    dist_backend: ClassVar[str] = "hccl"
    device_type: ClassVar[str] = "npu"

    config: AscendConfig

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine can run the backend, and if not, what to install (B2)."""
        reason = host.missing()
        return Availability(ok=not reason, reason=reason, versions=host.versions())

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Return the capabilities of the cards (B3). Processes that share a card take turns, without a daemon."""
        return Capabilities(
            device_ipc=host.shares_memory(host.versions()),
            memory_limit=True,
            concurrent_collectives=False,  # HCCL allows calls from only one thread at a time
            dtypes=frozenset({"float32", "bfloat16"}),
            num_devices=host.num_devices(),
        )

    @classmethod
    def import_env(cls) -> Mapping[str, str]:
        """Return variables with which torch can be imported if torch_npu is installed but cannot load (B11)."""
        return {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if host.breaks_torch() else {}

    def child_env(self, role: Role, share: float, local_rank: int, num_devices: int = 1) -> Mapping[str, str]:
        """Return the variables of a child that gets a share of a device (B4)."""
        config = self.config
        wanted = {
            ALLOCATOR: config.allocator,
            "TASK_QUEUE_ENABLE": str(config.task_queue),
            "HCCL_CONNECT_TIMEOUT": str(config.hccl_connect_timeout_s),
            "HCCL_EXEC_TIMEOUT": str(config.hccl_exec_timeout_s),
            "HCCL_BUFFSIZE": str(config.hccl_buffer_mb),
        }
        if share < 1:
            # All processes of one card would listen on HCCL's fixed ports.
            wanted |= {"HCCL_HOST_SOCKET_PORT_RANGE": "auto", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
        unsaid = {name: value for name, value in wanted.items() if name not in os.environ}
        if ALLOCATOR in os.environ:
            unsaid[ALLOCATOR] = _without_segments(os.environ[ALLOCATOR])
        return npus_visible_to_child(os.environ, host.num_devices(), local_rank, num_devices) | unsaid

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank and make it the current one (B6)."""
        torch = _torch_with_npu()
        torch.npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def device_id(self, device: torch.device) -> str:
        """Return a name that consists of host and card (B6)."""
        return card_id(device)

    def limit_memory(self, fraction: float) -> None:
        """Limit the memory of torch's allocator (B7).

        HCCL's buffers are not included, see ``hccl_buffer_mb``.
        """
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"a memory limit is a fraction above 0 and at most 1 of the device, not {fraction}"
            )
        _torch_with_npu().npu.set_per_process_memory_fraction(fraction)

    def process_group(self, rendezvous: Rendezvous, device: torch.device) -> ProcessGroup:
        """Return collectives among the members of ``rendezvous`` (B8)."""
        _torch_with_npu()
        from spec_backend_ascend.hccl_process_group import HcclProcessGroup

        return HcclProcessGroup(rendezvous, device)

    def transport(self, placement: Placement) -> Transport:
        """Return the feature transport for a placement (B9)."""
        if placement == "inline":
            from spec_kit.streams import InlineTransport

            return InlineTransport()
        _torch_with_npu()
        if placement == "disaggregated":
            from spec_backend_ascend.hccl_transport import HcclTransport

            return HcclTransport()
        from spec_backend_ascend.npu_sharing import NpuSharing
        from spec_kit.streams import IpcTransport

        required = self.config.ipc == "required"
        shares = required or (self.config.ipc == "auto" and self.capabilities().device_ipc)
        return IpcTransport(NpuSharing, share_device=shares, required=required)

    def kernel(self, name: str) -> Kernel | None:
        """Return the kernel with this name, or None (B10)."""
        _torch_with_npu()
        from spec_backend_ascend.kernels import npu_kernel

        return npu_kernel(name)


def _without_segments(settings: str) -> str:
    parts = [part.strip() for part in settings.split(",")]
    remaining = [part for part in parts if part and not part.startswith("expandable_segments")]
    return ",".join([*remaining, "expandable_segments:False"])


def _torch_with_npu() -> Any:
    """Return torch with ``torch.npu``, which exists once torch_npu is imported.

    With TORCH_DEVICE_BACKEND_AUTOLOAD=0, torch itself does not import torch_npu.
    """
    try:
        import torch
        import torch_npu  # noqa: F401
    except (ImportError, RuntimeError) as error:  # torch's own error has torch_npu's as its cause
        found = ", ".join(f"{name} {version}" for name, version in host.versions().items())
        raise PluginUnavailable(
            f"torch_npu does not load: {error.__cause__ or error}; installed: {found}; {host.SOURCE_IT}, in "
            "the version that this torch-npu asks for"
        ) from error
    return torch
