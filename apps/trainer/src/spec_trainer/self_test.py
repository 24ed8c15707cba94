"""``spec-trainer check``: a backend's self-test on this machine, step by step, each with its own verdict."""

from __future__ import annotations

import multiprocessing
import platform
import secrets
import time
from typing import TYPE_CHECKING, Any

from spec_core import Backend, plugins
from spec_core.errors import ConfigError, SpecError
from spec_core.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable


_COLLECTIVES_S = 60.0
"""For the second rank to start and every call to end."""


def run_self_test(name: str) -> dict[str, Any]:
    """{"ok", "backend", "versions", "steps": [{"step", "ok", "seconds", "detail"}]}. PluginError if there is none."""
    plugin = plugins.load(Backend, name)
    availability = plugin.probe()
    report: dict[str, Any] = {
        "backend": name,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "versions": dict(availability.versions),
        "steps": [{"step": "probe", "ok": availability.ok, "seconds": 0.0, "detail": availability.reason}],
    }
    if availability.ok:
        backend = plugin(plugin.Config(name=name))
        tests: dict[str, Callable[[Backend], str]] = {
            "device": _device,
            "memory limit": _memory_limit,
            "attention kernel": _attention,
            "2-rank collectives": _collectives,
            "transport round trip": _round_trip,
        }
        report["steps"] += [_verdict(step, test, backend) for step, test in tests.items()]
    report["ok"] = all(step["ok"] for step in report["steps"])
    return report


def _verdict(step: str, test: Callable[[Backend], str], backend: Backend) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        detail, ok = test(backend), True
    except (SpecError, RuntimeError, OSError) as error:
        detail, ok = f"{type(error).__name__}: {error}", False
    return {"step": step, "ok": ok, "seconds": round(time.perf_counter() - start, 3), "detail": detail}


def _device(backend: Backend) -> str:
    import torch

    device = backend.device(0)
    product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    if product.sum().item() != 64**3:
        raise RuntimeError(f"a 64 x 64 product on {device} is wrong")
    return str(device)


def _memory_limit(backend: Backend) -> str:
    if not backend.capabilities().memory_limit:
        return "not offered"
    backend.limit_memory(0.5)
    return "a fraction of 0.5 was accepted"


def _attention(backend: Backend) -> str:
    """The kernel against dense attention, in float32."""
    import torch

    kernel = backend.attention_kernel()
    if kernel is None:
        return "none: drafts use chunked dense attention"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 64, generator=generator).to(backend.device(0)) for _ in range(3))
    out, _ = kernel.forward(q, k, v, ((0, 5), (5, 12)))
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


def _collectives(backend: Backend) -> str:
    """A sum and a broadcast between this process and a child."""
    context = multiprocessing.get_context("spawn")
    token = secrets.token_hex(16)
    with Rendezvous("127.0.0.1:0", 0, 2, token, _COLLECTIVES_S) as rendezvous:
        child = context.Process(
            target=_second_rank, args=(backend.name, rendezvous.address, token), daemon=True
        )
        child.start()
        try:
            _sum_and_broadcast(backend, rendezvous)
        except ConfigError as error:  # two ranks need two devices here, and there is one
            return f"not run: {error}"
        finally:
            child.join(5.0)
            child.kill()
            child.join()
    return "sum and broadcast are right"


def _second_rank(name: str, address: str, token: str) -> None:
    plugin = plugins.load(Backend, name)
    with Rendezvous(address, 1, 2, token, _COLLECTIVES_S) as rendezvous:
        _sum_and_broadcast(plugin(plugin.Config(name=name)), rendezvous)


def _sum_and_broadcast(backend: Backend, rendezvous: Rendezvous) -> None:
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
    """One sample through the inline transport, bit for bit."""
    import torch

    from spec_core.records import FeatureSample, FeatureSchema

    schema = FeatureSchema(layers=(1, 2), hidden_size=8, dtype="float32")
    transport = backend.transport("inline")
    hidden = torch.arange(48, dtype=torch.float32).reshape(3, 2, 8).to(backend.device(0))
    sent = FeatureSample(sample_id=7, input_ids=torch.tensor([1, 2, 3]), hidden_TNH=hidden)
    with (
        transport.listen(schema, 1 << 20) as receiver,
        transport.connect(receiver.address, schema, 5.0) as sender,
    ):
        sender.send(sent, 5.0)
        received = receiver.receive(5.0)
        if not torch.equal(received.hidden_TNH, hidden):
            raise RuntimeError("the sample changed on its way")
        receiver.release(received)
    return "one sample, equal bit for bit"
