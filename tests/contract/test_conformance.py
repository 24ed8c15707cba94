"""The suites cannot be hollowed out in silence, quote every clause of their contract, and notice planted faults."""

import importlib
import inspect
import re

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_testing import (
    BackendSuite,
    DraftReplicaSuite,
    DraftSuite,
    EngineImagesSuite,
    EngineSuite,
    LauncherSuite,
    OptimizerSuite,
    ProcessGroupSuite,
    ServingSuite,
    StrategySuite,
    TrackerSuite,
    TransportSuite,
    WeightTransportSuite,
)
from spec_testing.conformance import ConformanceSuite

SUITES = {
    "spec_core.backend": [BackendSuite],
    "spec_core.draft": [DraftSuite],
    "spec_core.draft_replica": [DraftReplicaSuite],
    "spec_core.engine": [EngineSuite, DraftReplicaSuite, EngineImagesSuite],
    "spec_core.launcher": [LauncherSuite],
    "spec_core.optimizer": [OptimizerSuite],
    "spec_core.process_group": [ProcessGroupSuite],
    "spec_core.serving": [ServingSuite],
    "spec_core.strategy": [StrategySuite],
    "spec_core.tracker": [TrackerSuite],
    "spec_core.transport": [TransportSuite],
    "spec_core.weight_transport": [WeightTransportSuite],
}


def test_override_without_a_reason_is_refused():
    with pytest.raises(TypeError, match=r"test_b6_device_works .* pytest.mark.xfail\(reason=…\)"):
        type("Hollow", (BackendSuite,), {"test_b6_device_works": lambda self: None})


def test_switching_a_test_off_is_refused():
    with pytest.raises(TypeError, match="overrides test_b6_device_works"):
        type("Hollow", (BackendSuite,), {"test_b6_device_works": None})


def test_xfail_needs_a_reason():
    @pytest.mark.xfail
    def test_b6_device_works(self): ...

    with pytest.raises(TypeError, match="overrides test_b6_device_works"):
        type("Hollow", (BackendSuite,), {"test_b6_device_works": test_b6_device_works})


def test_override_with_a_reason_is_allowed():
    @pytest.mark.xfail(reason="the device is on order")
    def test_b6_device_works(self): ...

    overriding = type("Honest", (BackendSuite,), {"test_b6_device_works": test_b6_device_works})
    assert issubclass(overriding, ConformanceSuite)


def test_new_tests_and_fixtures_are_allowed():
    added = {"test_of_my_own": lambda self: None, "backend": pytest.fixture(lambda self: CpuBackend)}
    assert issubclass(type("Mine", (BackendSuite,), added), BackendSuite)


@pytest.mark.parametrize("module", sorted(SUITES))
def test_every_clause_has_a_test_that_quotes_it(module):
    contract = inspect.getdoc(importlib.import_module(module))
    clauses = set(re.findall(r"^([A-Z]\d+) ", contract, flags=re.MULTILINE))
    assert len(clauses) >= 5
    docs = [
        inspect.getdoc(test) or ""
        for suite in SUITES[module]
        for name, test in inspect.getmembers(suite)
        if name.startswith("test_")
    ]
    assert all(docs)
    quoted = {clause for doc in docs for clause in re.findall(r"[A-Z]\d+", doc.partition(":")[0])}
    assert clauses - quoted == set()


class Forgetful(CpuBackend):
    """Breaks B4 and B7: writes the environment, ignores a limit."""

    def child_env(self, role, share, local_rank):
        import os

        os.environ["LEAKED_BY_A_BACKEND"] = role
        return {}

    def limit_memory(self, fraction):
        return None


@pytest.mark.parametrize(
    "test", ["test_b4_child_env_is_a_pure_function", "test_b7_limit_is_enforced_or_refused"]
)
def test_planted_fault_is_found(test, monkeypatch):
    monkeypatch.delenv("LEAKED_BY_A_BACKEND", raising=False)
    arguments = ("trainer", 0.5) if "b4" in test else ()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(BackendSuite(), test)(Forgetful(Forgetful.Config()), *arguments)
