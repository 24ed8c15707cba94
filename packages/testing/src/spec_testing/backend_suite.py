"""BackendSuite tests the contract of spec_core.backend (B1–B11).

::

    class TestMyBackend(BackendSuite):
        @pytest.fixture
        def backend(self) -> type[Backend]:
            return MyBackend

B2 and B3 are tested on every machine. If ``probe`` says that the hardware is missing, the other tests are
    skipped with the probe's reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch

from spec_core import Backend, BackendConfig, Draft, Placement, Transport, plugins
from spec_core.errors import ConfigError
from spec_core.records import Availability, Capabilities, FeatureSample, FeatureSchema
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_testing.conformance import ConformanceSuite, run_python
from spec_testing.dense_attention import attention_reference
from spec_testing.kernels import compared_kernels, drawing
from spec_testing.limits import patient

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

PROBE_LIMIT_S = patient(5.0)
TIMEOUT_S = patient(20.0)
_ASK = """
import importlib, json, time
plugin = getattr(importlib.import_module({module!r}), {name!r})
start = time.monotonic()
availability = plugin.probe()
plugin.capabilities()
seconds = time.monotonic() - start
print(json.dumps({{"ok": availability.ok, "reason": availability.reason, "seconds": seconds}}))
"""

_EXCEED_LIMIT = """
import importlib, torch
plugin = getattr(importlib.import_module({module!r}), {name!r})
backend = plugin(plugin.Config(name=plugin.name))
device = backend.device(0)
total = torch.get_device_module(device).mem_get_info(device)[1]
backend.limit_memory(0.05)
torch.empty(total // 50, dtype=torch.uint8, device=device)
try:
    torch.empty(total // 10, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    print("refused")
"""


class BackendSuite(ConformanceSuite):
    """Tests of a backend. A subclass must define the fixture ``backend``, which returns the plugin's class."""

    sdk_modules: ClassVar[tuple[str, ...]] = ()
    """Python modules of the vendor's SDK; the suite pretends that they are not installed."""

    @pytest.fixture
    def backend(self) -> type[Backend]:
        """Return the class of the backend under test."""
        raise pytest.UsageError("a BackendSuite needs a fixture 'backend' that returns the plugin's class")

    @pytest.fixture
    def usable(self, backend: type[Backend]) -> Backend:
        """Return an object of the backend; skip the test if this machine cannot run it."""
        availability = backend.probe()
        if not availability.ok:
            pytest.skip(f"backend {backend.name!r} cannot run here: {availability.reason}")
        return backend(backend.Config(name=backend.name))

    def host_traces(self) -> set[str]:
        """Return the names of processes, files and the like that ``prepare_host`` could have left on the host.

        A subclass adds the daemons and directories of its backend.
        """
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        processes = children.read_text().split() if children.exists() else []
        return {f"process {pid}" for pid in processes} | {f"thread {t.name}" for t in threading.enumerate()}

    def test_b1_identity(self, backend: type[Backend]) -> None:
        """B1: the entry point called ``name`` is this class; core accepts its API version and its Config."""
        assert plugins.load(Backend, backend.name) is backend
        assert backend.api_version in Backend.API_VERSIONS
        assert issubclass(backend.Config, BackendConfig)

    def test_b2_probe_answers(self, backend: type[Backend]) -> None:
        """B2: ``probe`` returns whether the backend can run and, if not, why; versions are strings."""
        availability = backend.probe()
        assert isinstance(availability, Availability)
        assert availability.ok or availability.reason
        assert all(isinstance(value, str) for value in availability.versions.values())

    def test_b2_b3_ask_without_torch(self, backend: type[Backend]) -> None:
        """B2, B3: without torch the module imports, and ``probe`` and ``capabilities`` return quickly."""
        assert self._ask(backend, blocked=["torch"])["seconds"] < PROBE_LIMIT_S

    def test_b2_missing_sdk_is_a_reason(self, backend: type[Backend]) -> None:
        """B2: without its SDK the module still imports, and probe says what to install."""
        if not self.sdk_modules:
            pytest.skip(f"backend {backend.name!r} declares no sdk_modules")
        answer = self._ask(backend, blocked=self.sdk_modules)
        assert answer["ok"] is False
        assert answer["reason"]

    def test_b3_capabilities(self, backend: type[Backend]) -> None:
        """B3: capabilities are frozen, the same on every call, and name dtypes of torch."""
        capabilities = backend.capabilities()
        assert isinstance(capabilities, Capabilities)
        assert capabilities == backend.capabilities()
        with pytest.raises(dataclasses.FrozenInstanceError):
            capabilities.device_ipc = True  # type: ignore[misc]
        assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in capabilities.dtypes)

    @pytest.mark.parametrize("share", [0.25, 1.0])
    @pytest.mark.parametrize("role", ["engine", "trainer"])
    def test_b4_child_env_is_a_pure_function(self, usable: Backend, role: str, share: float) -> None:
        """B4: two calls return equal mappings of str to str; this process's environment does not change."""
        before = dict(os.environ)
        env = usable.child_env(role, share, 0)  # type: ignore[arg-type]
        assert dict(env) == dict(usable.child_env(role, share, 0))  # type: ignore[arg-type]
        assert all(isinstance(text, str) and "\0" not in text for item in env.items() for text in item)
        assert dict(os.environ) == before

    @pytest.mark.parametrize("placement", PLACEMENTS)
    def test_b5_prepare_host_leaves_nothing(self, usable: Backend, placement: Placement) -> None:
        """B5: after the block, or an exception in it, all daemons have ended; the exception is raised."""
        before = (self.host_traces(), dict(os.environ))
        with usable.prepare_host(placement):
            pass
        assert (self.host_traces(), dict(os.environ)) == before
        with pytest.raises(KeyError, match="planted"), usable.prepare_host(placement):
            raise KeyError("planted")
        assert (self.host_traces(), dict(os.environ)) == before

    def test_b6_device_works(self, usable: Backend) -> None:
        """B6: ``device(0)`` has the type ``device_type`` and computes; ``device_id`` is constant ASCII."""
        device = usable.device(0)
        assert isinstance(device, torch.device)
        assert device.type == usable.device_type
        assert (torch.ones(1, device=device) + 1).item() == 2
        assert usable.device_id(device).isascii()
        assert usable.device_id(device) == usable.device_id(usable.device(0))

    def test_b7_limit_is_enforced_or_refused(self, usable: Backend) -> None:
        """B7: memory beyond the fraction is refused; a backend without limits refuses the call instead."""
        if not usable.capabilities().memory_limit:
            with pytest.raises(ConfigError, match=r"0\.5"):
                usable.limit_memory(0.5)
            return
        plugin = type(usable)
        code = _EXCEED_LIMIT.format(module=plugin.__module__, name=plugin.__qualname__)
        assert run_python(code).split() == ["refused"]

    def test_b8_process_group_needs_no_default_group(self, usable: Backend) -> None:
        """B8: collectives work over a rendezvous, and need no default group of torch.

        ProcessGroupSuite tests groups of several processes.
        """
        device = usable.device(0)
        with (
            TcpRendezvous("127.0.0.1:0", 0, 1, "a group of one", TIMEOUT_S).join() as rendezvous,
            usable.process_group(rendezvous, device) as group,
        ):
            value = torch.arange(3.0, device=device)
            group.all_reduce(value)
            assert value.tolist() == [0.0, 1.0, 2.0]
            assert not torch.distributed.is_initialized()

    def test_b8_group_settings_are_one_word(self, usable: Backend) -> None:
        """B8: ``group_settings`` is the same at every call, and a single line without separators."""
        settings = usable.group_settings()
        assert settings == usable.group_settings()
        assert settings.isascii()
        assert not {*settings} & {*"| \n"}

    @pytest.mark.parametrize("placement", PLACEMENTS)
    def test_b9_transport_delivers_or_is_refused(self, usable: Backend, placement: Placement) -> None:
        """B9: the placement's transport delivers a sample; an impossible placement raises ConfigError."""
        device = usable.device(0)
        schema = FeatureSchema(layers=(1, 2), hidden_size=4, dtype="float32")
        transport = _transport_or_refusal(usable, placement)
        if isinstance(transport, ConfigError):
            assert placement in str(transport)
            return
        sent = FeatureSample(
            request_id=7,
            input_ids=torch.arange(3, device=device),
            hidden_TNH=torch.randn(schema.shape(3), device=device),
        )
        with (
            transport.listen(schema, 1 << 20) as receiver,
            transport.connect(receiver.address, schema, TIMEOUT_S) as sender,
        ):
            ticket = sender.send(sent, TIMEOUT_S)
            got = receiver.receive(TIMEOUT_S)
            assert got.request_id == sent.request_id
            assert torch.equal(got.hidden_TNH.cpu(), sent.hidden_TNH.cpu())
            receiver.release(got)
            ticket.result(TIMEOUT_S)

    @pytest.mark.parametrize(
        ("bounds", "window"),
        [([(0, 9)], None), ([(0, 1), (1, 6), (7, 9)], None), ([], None), ([(0, 2), (2, 9)], 3)],
    )
    def test_b10_attention_equals_dense(
        self, usable: Backend, bounds: list[tuple[int, int]], window: int | None
    ) -> None:
        """B10: output, log-sum-exp and gradients equal dense attention's; rows outside every document are 0."""
        forward, backward = (usable.kernel(f"causal_attention{part}") for part in ("", "_backward"))
        if forward is None or backward is None:
            pytest.skip(f"backend {usable.name!r} has no causal_attention: drafts use dense attention there")
        device = usable.device(0)
        generator = torch.Generator().manual_seed(0)
        # 9 tokens, 4 query heads and 2 key heads of width 32, the smallest width that every kernel supports.
        q, k, v, grad = (torch.randn(9, heads, 32, generator=generator) for heads in (4, 2, 2, 4))
        wide = (q.double().requires_grad_(), k.double().requires_grad_(), v.double().requires_grad_())
        out, lse = attention_reference(*wide, bounds, window)
        expected = torch.autograd.grad(out, wide, grad.double(), allow_unused=True, materialize_grads=True)
        q, k, v, grad = (tensor.to(device) for tensor in (q, k, v, grad))
        got_out, got_lse = forward(q, k, v, bounds, window)
        got = backward(grad, (q, k, v, got_out, got_lse), bounds, window)
        rows = [row for start, stop in bounds for row in range(start, stop)]
        for actual, reference in zip((got_out, *got), (out, *expected), strict=True):
            torch.testing.assert_close(actual.cpu().double(), reference, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got_lse.cpu().double()[rows], lse[rows], rtol=1e-4, atol=1e-5)

    def test_b10_attention_of_pieces_equals_dense(self, usable: Backend) -> None:
        """B10: attention of pieces of documents equals the same rows of dense attention, as do its gradients."""
        forward, backward = (usable.kernel(f"prefixed_attention{part}") for part in ("", "_backward"))
        if forward is None or backward is None:
            pytest.skip(f"backend {usable.name!r} has no prefixed_attention: divided samples use others")
        device = usable.device(0)
        generator = torch.Generator().manual_seed(0)
        bounds = [(0, 6), (7, 12)]
        pieces = [(0, 0, 2), (0, 4, 6), (7, 9, 12)]
        rows = [row for _, first, stop in pieces for row in range(first, stop)]
        q, k, v, grad = (torch.randn(12, heads, 32, generator=generator) for heads in (4, 2, 2, 4))
        wide = (q.double().requires_grad_(), k.double().requires_grad_(), v.double().requires_grad_())
        out, lse = attention_reference(*wide, bounds)
        expected = list(torch.autograd.grad(out[rows], wide, grad[rows].double()))
        expected[0] = expected[0][rows]
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            own_q, own_grad, *keys = (part.to(device, dtype) for part in (q[rows], grad[rows], k, v))
            got_out, got_lse = forward(own_q, *keys, pieces)
            got = backward(own_grad, (own_q, *keys, got_out, got_lse), pieces)
            references = (out[rows], lse[rows], *expected)
            for actual, reference in zip((got_out, got_lse, *got), references, strict=True):
                error = (actual.cpu().double() - reference).norm()
                assert error <= tolerance * reference.norm()

    def test_b10_kernels_agree_with_plain_torch(self, usable: Backend) -> None:
        """B10: every kernel of an installed draft has the values and gradients of its plain version.

        Kernels that drafts provide for this type of device are tested, too.
        """
        find = plugins.find_kernel(usable)
        draw = drawing(usable.device(0))
        sets = [draft.kernels() for _, draft in plugins.load_each(Draft) if isinstance(draft, type)]
        if not [name for kernels in sets for name in compared_kernels(find, kernels, draw)]:
            pytest.skip(f"backend {usable.name!r} has no kernel that an installed draft uses")

    def test_b10_knows_no_kernel_of_an_unknown_name(self, usable: Backend) -> None:
        """B10: ``kernel`` returns None for an unknown name."""
        assert usable.kernel("no kernel has this name") is None

    def test_b11_torch_is_left_alone_where_the_backend_works(self, backend: type[Backend]) -> None:
        """B11: ``import_env`` is empty if this backend can run; two calls return equal mappings of str to str."""
        env = backend.import_env()
        assert env == backend.import_env()
        assert all(isinstance(text, str) for item in env.items() for text in item)
        if backend.probe().ok:
            assert not env

    def _ask(self, backend: type[Backend], blocked: Sequence[str]) -> dict[str, Any]:
        code = _ASK.format(module=backend.__module__, name=backend.__qualname__)
        return json.loads(run_python(code, blocked))


def _transport_or_refusal(backend: Backend, placement: Placement) -> Transport | ConfigError:
    try:
        return backend.transport(placement)
    except ConfigError as refusal:
        return refusal
