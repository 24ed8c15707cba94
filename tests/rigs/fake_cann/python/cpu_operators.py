"""Gives the genuine torch_npu its arithmetic: every operator gets a CPU body on tensors that alias device memory.

A body first drains the stream that is current in its thread, and no other: what another stream is still to bring
is not there yet, as on a device. Copies within a device are left to the stream, so they are late themselves.
Allocation and views stay torch_npu's own. Only what torch_npu registers is replaced; of its own operators, those of
``npu_operators.py``.
"""

import ctypes
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch_npu
from npu_operators import OPERATORS
from torch import Tensor

KEY = "PrivateUse1"
NATIVE = {
    *("empty.memory_format", "empty_strided", "empty_with_format", "unsafe_empty_with_format", "resize_"),
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to"),
    *("resize_as_", "_local_scalar_dense", "alias", "detach", "lift_fresh", "record_stream"),
    *("is_pinned", "_pin_memory", "_has_compatible_shallow_copy_type"),
}
NATIVE_PREFIXES = ("view", "as_strided", "_reshape_alias", "squeeze", "unsqueeze", "unfold")
D2D = 3
"""ACL_MEMCPY_DEVICE_TO_DEVICE"""

_acl = ctypes.CDLL("libascendcl.so")
_library = torch.library.Library("aten", "IMPL")
_npu_library = torch.library.Library("npu", "IMPL")
_issuing: dict[int | None, threading.RLock] = {}
"""A lock for each stream that has been current: held by the thread whose operator runs."""


def install() -> None:
    """Replaces the kernels, for the life of the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding a kernel is what this is for
        for name in _registered(KEY):
            if name not in NATIVE and not name.startswith(NATIVE_PREFIXES):
                _library.impl(name, SPECIAL.get(name) or _on_cpu(_operator(name)), KEY, allow_override=True)
        for name in _registered(KEY) | _registered("Autograd" + KEY):
            if name not in NATIVE and _is_composite(name):
                for key in (KEY, "Autograd" + KEY):
                    _library.impl(name, _decomposed(_operator(name)), key, allow_override=True)
        for name, function in OPERATORS.items():
            _npu_library.impl(name, _on_cpu(function), KEY, allow_override=True)


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    return {name for name in names if _operator(name) is not None}


def _operator(name: str) -> Any:
    """None for what torch_npu registers and this torch does not have."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _is_composite(name: str) -> bool:
    """torch has a body made of other operators, and torch_npu a kernel of its own instead (matmul, attention)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")


def _decomposed(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator.decompose(*args, **kwargs)


def _stream() -> ctypes.c_void_p:
    """The current stream; asking for its handle drains torch_npu's own queue first."""
    torch_npu.npu._lazy_init()
    handle = torch_npu._C._npu_getCurrentRawStream(torch_npu._C._npu_getDevice())
    if handle not in _issuing:
        _issuing.setdefault(handle, threading.RLock())
        _calm_release_threads()
    return ctypes.c_void_p(handle)


def _calm_release_threads() -> None:
    """Let torch_npu's threads that look for memory to release sleep longer than 50 µs between two looks: each of them
    takes a fifth of a core, even where nothing happens. Only root may; otherwise everything is just slower."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text() == "release_thread\n":
                Path("/proc", task.name, "timerslack_ns").write_text("2000000")


@contextmanager
def _in_order() -> Generator[None]:
    """Wait for the work of the current stream; until the block ends nobody else puts anything on it, as on
    a device: memory that one thread frees may serve another's next operator on that stream."""
    with _issuing[_stream().value]:
        _drain()
        yield


def _drain() -> None:
    code = _acl.FakeCannDrain(_stream())
    if code:
        raise RuntimeError(f"a task of the current stream has failed, ACL code {code}")


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    """A new device tensor with the bytes of a CPU tensor; elements that share memory get memory of their own."""
    if not torch.ops.aten.is_non_overlapping_and_dense(value):
        value = value.contiguous()
    out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        _drain()  # torch_npu's own calls of other threads may still use what this memory was before
        alias(out).copy_(value)
    return out


def _on_cpu(operator: Any) -> Callable[..., Any]:
    """The operator's CPU body for device tensors: results that are arguments stay these arguments."""

    def body(*args: Any, **kwargs: Any) -> Any:
        with _in_order():
            return run(args, kwargs)

    def run(args: Any, kwargs: Any) -> Any:
        taken: dict[int, tuple[Tensor, Tensor]] = {}
        devices: list[torch.device] = []

        def enter(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "npu":
                devices.append(value.device)
                cpu = alias(value)
                taken[id(cpu)] = (cpu, value)
                return cpu
            if isinstance(value, torch.device) and value.type == "npu":
                devices.append(value)
                return torch.device("cpu")
            if isinstance(value, torch.Generator) and value.device.type == "npu":
                return None
            return value

        def leave(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            if id(value) in taken:
                return taken[id(value)][1]
            return _on_device(value, devices[0] if devices else torch.device("npu"))

        args, kwargs = _each(enter, args), _each(enter, kwargs)
        if "device" in kwargs and kwargs["device"] is None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return _each(leave, operator(*args, **kwargs))

    return body


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments or results of an operator with each leaf changed; torch's own ``tree_map`` is slower."""
    if isinstance(value, (tuple, list)):
        return type(value)(_each(change, part) for part in value)
    if isinstance(value, dict):
        return {key: _each(change, part) for key, part in value.items()}
    return change(value)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if _is_plain(target, source):
        return _copy_bytes(target, source)
    with _in_order():
        to = alias(target) if target.device.type == "npu" else target
        to.copy_(alias(source) if source.device.type == "npu" else source)
    return target


def _copy_bytes(target: Tensor, source: Tensor) -> Tensor:
    """Late, as the stream is."""
    stream, size = _stream(), target.nbytes
    with _issuing[stream.value]:
        code = _acl.aclrtMemcpyAsync(
            *(ctypes.c_void_p(target.data_ptr()), ctypes.c_size_t(size)),
            *(ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(size), D2D, stream),
        )
    if code:
        raise RuntimeError(f"aclrtMemcpyAsync: ACL code {code}")
    return target


def _is_plain(target: Tensor, source: Tensor) -> bool:
    """Bytes of one device, as they are: the stream's own work. Negated and conjugated views are not."""
    return (
        target.device == source.device
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.is_neg() or source.is_neg() or target.is_conj() or source.is_conj())
    )


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    with _in_order():
        value = alias(source) if source.device.type == "npu" else source
        value = value.clone() if dtype in (None, value.dtype) else value.to(dtype)
        to = source.device if device is None else torch.device(device)
        return _on_device(value, to) if to.type == "npu" else value


SPECIAL = {"copy_": _copy, "_to_copy": _to_copy}
