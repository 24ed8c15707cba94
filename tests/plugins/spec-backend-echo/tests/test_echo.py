"""The backend keeps the contract of backends: two fixtures and three subclasses say so."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from spec_backend_echo.backend import EchoBackend, EchoConfig

from spec_testing import BackendSuite, ProcessGroupSuite, TransportSuite

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core import Backend, ProcessGroup, Rendezvous, Transport


def build_group(rendezvous: Rendezvous) -> ProcessGroup:
    backend = EchoBackend(EchoConfig(name="echo"))
    return backend.process_group(rendezvous, backend.device(0))


def build_transport() -> Transport:
    return EchoBackend(EchoConfig(name="echo")).transport("colocated")


class TestBackend(BackendSuite):
    @pytest.fixture
    def backend(self) -> type[Backend]:
        return EchoBackend

    def host_traces(self) -> set[str]:
        left = {str(folder) for folder in Path(tempfile.gettempdir()).glob("echo-*")}
        return super().host_traces() | left


class TestProcessGroup(ProcessGroupSuite):
    @pytest.fixture
    def build(self) -> Callable[[Rendezvous], ProcessGroup]:
        return build_group


class TestTransport(TransportSuite):
    @pytest.fixture
    def build(self) -> Callable[[], Transport]:
        return build_transport


def test_says_what_it_was_asked_for():
    backend = EchoBackend(EchoConfig(name="echo", threads=3))
    assert backend.child_env("engine", 0.5, 0) == {"OMP_NUM_THREADS": "3"}
    with backend.prepare_host("colocated"):
        backend.transport("inline")
    assert backend.calls == ["child_env engine 0.5 0", "prepare_host colocated", "transport inline"]
