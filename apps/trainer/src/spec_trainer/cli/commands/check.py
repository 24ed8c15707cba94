"""``spec-trainer check``: test a backend on this machine in several steps, and report each result."""

from __future__ import annotations

import logging
import platform
import secrets
import time
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import metadata
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, Any

from spec_core import Backend, Draft, foreign_errors, plugins
from spec_core.errors import ConfigError, PluginError, SpecError
from spec_core.records import FeatureSample, FeatureSchema
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_trainer.cli.commands.own_process import Outcome, OwnProcess, outcome_of
from spec_trainer.cli.commands.small_runs import small_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from spec_core import Placement

_OTHER_PROCESS_S = 60.0
"""Timeout in seconds for the start of a second process, and for each call between the two processes."""
_LATER_S = 1.0
"""Seconds by which the second process may fail later than the first, if it was the cause."""
_STEP_S = 300.0
"""Longest time in seconds of a step in a process of its own."""
_SCHEMA = FeatureSchema(layers=(1, 2), hidden_size=8, dtype="float32")


def check_backend(name: str, thorough: bool = False) -> dict[str, Any]:
    """Test the backend ``name`` and return {"ok", "backend", "versions", "capabilities", "steps": […], …}.

    Each step is {"step", "ok", "seconds", "detail"}. A backend that is not available is not constructed. Raise
    PluginError if no backend has that name. ``thorough``: train, too, and run each step in a process of its own,
    for a limited time.
    """
    plugin = plugins.load(Backend, name)
    availability = plugin.probe()
    report: dict[str, Any] = {
        "backend": name,
        "package": ", ".join(found.owner for found in plugins.installed(Backend) if found.name == name),
        "spec-trainer": metadata.version("spec-trainer"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "versions": dict(availability.versions),
    }
    steps = [{"step": "probe", "ok": availability.ok, "seconds": 0.0, "detail": availability.reason}]
    if availability.ok:
        capabilities = asdict(plugin.capabilities())
        report["capabilities"] = {**capabilities, "dtypes": sorted(capabilities["dtypes"])}
        tests = {**_tests(), **(small_runs() if thorough else {})}
        run = _outcome_apart if thorough else outcome_of
        steps += [_verdict(step, partial(run, partial(_on, name, test))) for step, test in tests.items()]
    report["steps"] = steps
    report["ok"] = all(step["ok"] for step in steps)
    return report


def _tests() -> dict[str, Callable[[Backend], str]]:
    return {
        "device": _device,
        "memory limit": _memory_limit,
        "attention kernel": _attention,
        "kernels": _kernels,
        "2-rank collectives": _collectives,
        "transport round trip": _round_trip,
        "transport, colocated": partial(_between_processes, placement="colocated"),
        "transport, disaggregated": partial(_between_processes, placement="disaggregated"),
    }


def _verdict(step: str, run: Callable[[], Outcome]) -> dict[str, Any]:
    start = time.perf_counter()
    detail, ok = run()
    return {"step": step, "ok": ok, "seconds": round(time.perf_counter() - start, 3), "detail": detail}


def _outcome_apart(step: Callable[[], str]) -> Outcome:
    with OwnProcess(step) as process:
        return process.outcome(_STEP_S)


def _on(name: str, test: Callable[[Backend], str]) -> str:
    return test(_load(name))


def _device(backend: Backend) -> str:
    device = backend.device(0)  # before torch's import, whose errors it explains

    import torch

    product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    if product.sum().item() != 64**3:
        raise RuntimeError(f"a 64 x 64 product on {device} is wrong")
    # torch.cpu has no names.
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: platform.machine())(device)
    return f"{device}, {name}"


def _memory_limit(backend: Backend) -> str:
    if not backend.capabilities().memory_limit:
        return "not offered"
    backend.limit_memory(0.5)
    return "a fraction of 0.5 was accepted"


def _attention(backend: Backend) -> str:
    """Compare the backend's causal attention kernel with dense attention, in float32."""
    import torch

    attention = backend.kernel("causal_attention")
    if attention is None:
        return "none: drafts use chunked dense attention"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 64, generator=generator).to(backend.device(0)) for _ in range(3))
    out, _ = attention(q, k, v, ((0, 5), (5, 12)))
    dense = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(part[start:stop].transpose(0, 1) for part in (q, k, v)), is_causal=True
            ).transpose(0, 1)
            for start, stop in ((0, 5), (5, 12))
        ]
    )
    worst = (out - dense).abs().max().item()
    if worst > 1e-2:
        raise RuntimeError(f"differs from dense attention by {worst:.2e}")
    return f"largest difference from dense attention {worst:.1e}"


def _kernels(backend: Backend) -> str:
    """Name the kernels that the installed drafts get, those that they compute in plain torch, and broken drafts."""
    names = set[str]()
    broken = list[str]()
    for name, draft in plugins.load_each(Draft):
        try:
            if not isinstance(draft, type):
                raise draft
            with foreign_errors(PluginError, f"draft {name!r} is passed over"):
                names.update(vars(draft.kernels()()))
        except PluginError as error:
            broken.append(str(error))
    find = plugins.find_kernel(backend)
    used = sorted(name for name in names if find(name) is not None)
    plain = sorted(names.difference(used))
    return "; ".join([", ".join(used) or "none", f"plain torch: {', '.join(plain) or 'none'}", *broken])


def _collectives(backend: Backend) -> str:
    """Run an all-reduce and a broadcast between this process and a child."""
    token = secrets.token_hex(16)
    with (
        TcpRendezvous("127.0.0.1:0", 0, 2, token, _OTHER_PROCESS_S) as rendezvous,
        _second_process(partial(_second_rank, backend.name, rendezvous.address, token)),
    ):
        try:
            _sum_and_broadcast(backend, rendezvous)
        except ConfigError as error:  # two ranks need two devices here, and there is one
            return f"not run: {error}"
    return "sum and broadcast are right"


@contextmanager
def _second_process(step: Callable[[], str]) -> Iterator[None]:
    """Run ``step`` in a second process during the ``with`` block; an error of the block names the other's."""
    with OwnProcess(step) as process:
        try:
            yield
        except (SpecError, RuntimeError, OSError) as error:
            detail, ok = process.outcome(0) if process.ended(_LATER_S) else ("", True)
            if ok:
                raise
            raise RuntimeError(f"{error}; the second process: {detail}") from error


def _second_rank(name: str, address: str, token: str) -> str:
    with TcpRendezvous(address, 1, 2, token, _OTHER_PROCESS_S) as rendezvous:
        _sum_and_broadcast(_load(name), rendezvous)
    return ""


def _load(name: str) -> Backend:
    plugin = plugins.load(Backend, name)
    return plugin(plugin.Config(name=name))


def _sum_and_broadcast(backend: Backend, rendezvous: TcpRendezvous) -> None:
    import torch

    rendezvous.join()
    device = backend.device(rendezvous.rank % backend.capabilities().num_devices)
    with backend.process_group(rendezvous, device) as group:
        summed = torch.full((1000,), float(rendezvous.rank + 1), device=device)
        group.all_reduce(summed)
        sent = torch.arange(1000, device=device) * (rendezvous.rank == 0)
        group.broadcast(sent, src=0)
        group.barrier()
        if summed.unique().tolist() != [3.0] or sent.sum().item() != 499500:
            raise RuntimeError("a sum or a broadcast between two ranks is wrong")


def _round_trip(backend: Backend) -> str:
    """Send one sample through the inline transport and compare it bit for bit."""
    transport = backend.transport("inline")
    device = backend.device(0)
    with (
        transport.listen(_SCHEMA, 1 << 20) as receiver,
        transport.connect(receiver.address, _SCHEMA, 5.0) as sender,
    ):
        sender.send(_sample(device), 5.0)
        received = receiver.receive(5.0)
        _assert_equal(received, _sample(device))
        receiver.release(received)
    return "one sample, equal bit for bit"


def _between_processes(backend: Backend, placement: Placement) -> str:
    """Receive one sample from a child on the same device (colocated) or on another device (disaggregated)."""
    device = backend.device(0)
    sender = 0 if placement == "colocated" else 1 % backend.capabilities().num_devices
    try:
        transport = backend.transport(placement)
    except ConfigError as error:
        return f"not run: {error}"
    with _warnings_are_failures():
        receiver = transport.listen(_SCHEMA, 1 << 20)
    with (
        receiver,
        _second_process(partial(_send_one, backend.name, placement, sender, receiver.address)),
    ):
        received = receiver.receive(_OTHER_PROCESS_S)
        _assert_equal(received, _sample(device))
        receiver.release(received)
    through_host = placement == "colocated" and not backend.capabilities().device_ipc
    way = " through host memory" if through_host else ""
    return f"one sample from device {sender} to device 0{way}, equal bit for bit"


@contextmanager
def _warnings_are_failures() -> Iterator[None]:
    """Raise RuntimeError if a warning is logged in the ``with`` block, such as that memory is not shared."""
    handler = BufferingHandler(100)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    if handler.buffer:
        raise RuntimeError("; ".join(record.getMessage() for record in handler.buffer))


def _send_one(name: str, placement: Placement, local_rank: int, address: str) -> str:
    backend = _load(name)
    device = backend.device(local_rank)
    with backend.transport(placement).connect(address, _SCHEMA, _OTHER_PROCESS_S) as sender:
        sender.send(_sample(device), _OTHER_PROCESS_S).result(_OTHER_PROCESS_S)
    return ""


def _sample(device: torch.device) -> FeatureSample:
    import torch

    hidden_TNH = torch.arange(48, dtype=torch.float32).reshape(_SCHEMA.shape(3)).to(device)
    return FeatureSample(request_id=7, input_ids=torch.tensor([1, 2, 3]), hidden_TNH=hidden_TNH)


def _assert_equal(received: FeatureSample, sent: FeatureSample) -> None:
    import torch

    if received.request_id != sent.request_id or not torch.equal(
        received.hidden_TNH.cpu(), sent.hidden_TNH.cpu()
    ):
        raise RuntimeError("the sample changed on its way")
