"""Find Ascend's software on this host without importing torch or opening a device."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from spec_backend_ascend import acl, hccl

DRIVER = "usr/local/Ascend/driver/version.info"
INSTALLED = "etc/ascend_install.info"
"""File that names the driver's folder if it is not the default folder."""
TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
IPC_SINCE = {"driver": (25, 3), "cann": (8, 3)}
"""First releases in which processes can share a card's memory: HDK 25.3.RC1 and CANN 8.3.RC1, according to torch_npu
(docs/zh/developer_notes/memory_management/memory_sharing_ipc.md of Ascend/pytorch)."""
SOURCE_IT = "source /usr/local/Ascend/ascend-toolkit/set_env.sh (or where CANN is installed)"


def versions(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the versions of the installed software among torch, torch-npu, CANN and driver."""
    found = {
        "torch": _distribution("torch"),
        "torch-npu": _distribution("torch-npu"),
        "cann": _cann(environ),
        "driver": _driver(root),
    }
    return {name: version for name, version in found.items() if version}


def missing() -> str:
    """Return why this process cannot use an NPU, and what to do about it; an empty string if it can."""
    for module, distribution in (("torch", "torch"), ("torch_npu", "torch-npu")):
        if importlib.util.find_spec(module) is None:
            return f"{distribution} is not installed: pip install {distribution}"
    if library := _missing_library():
        return (
            f"CANN is not in this shell ({library} cannot be loaded): {SOURCE_IT}; until then, and with torch-npu "
            "installed, a plain 'import torch' works only under TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    return _mismatch() or _no_device()


def breaks_torch() -> bool:
    """Return whether importing torch fails because torch loads torch_npu automatically."""
    installed = importlib.util.find_spec("torch_npu") is not None
    return installed and bool(_missing_library() or _mismatch())


def num_devices() -> int:
    """Return the number of this host's NPUs; 0 without a driver."""
    try:
        return acl.device_count()
    except (OSError, AttributeError, acl.AclError):
        return 0


def shares_memory(found: Mapping[str, str]) -> bool:
    """Return whether processes can share a card's memory with the versions ``found`` of driver and CANN."""
    return all(_release(found.get(name, "")) >= since for name, since in IPC_SINCE.items())


def _missing_library() -> str:
    """Return the first of CANN's libraries that cannot be loaded; an empty string if all can be loaded."""
    for library, load in ((acl.LIBRARY, acl.acl_library), (hccl.LIBRARY, hccl.hccl_library)):
        try:
            load()
        except OSError:
            return library
    return ""


def _mismatch() -> str:
    """Return why torch_npu and torch do not fit together; an empty string if they do.

    torch_npu is built for exactly one version of torch without CUDA.
    """
    torch, extension = _distribution("torch"), _distribution("torch-npu")
    if torch and extension and _release(torch) != _release(extension):
        return f"torch-npu {extension} does not go with torch {torch}: install both in one version, such as 2.13.0"
    if extension and _has_cuda():
        return f"torch {torch} is built for CUDA, torch-npu {extension} needs a build without: install that"
    return ""


def _has_cuda() -> bool:
    """Return whether the installed torch is built with CUDA."""
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations if found else None) or ()
    return any(Path(folder, "lib/libtorch_cuda.so").exists() for folder in folders)


def _no_device() -> str:
    """Return which of this process's NPUs do not answer, and what to do; an empty string if all of them do."""
    count = num_devices()
    listed = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if count >= (1 if listed is None else len(listed.split(","))):
        return ""
    if listed is None:
        return "no NPU answers: check the driver with 'npu-smi info', and /dev/davinci* inside a container"
    return (
        f"ASCEND_RT_VISIBLE_DEVICES={listed!r}: {count} NPUs of this list answer (an empty list is invalid): unset "
        "it to use all NPUs, or give ids as in 0,1, which 'npu-smi info' lists"
    )


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cann(environ: Mapping[str, str]) -> str:
    for variable in TOOLKIT_VARIABLES:
        if environ.get(variable):
            files = sorted(Path(environ[variable]).glob("*/ascend_toolkit_install.info"))
            return _field(files[0], "version") if files else ""
    return ""


def _driver(root: Path) -> str:
    where = _field(root / INSTALLED, "Driver_Install_Path_Param")
    own = root / where.lstrip("/") / "driver/version.info" if where else root / DRIVER
    return _field(own, "Version")


def _field(file: Path, name: str) -> str:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^{name}\s*=\s*(\S+)\s*$", text, re.MULTILINE)
    return match[1] if match else ""


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (25, 3) for ``25.3.rc1.2``; empty if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()
