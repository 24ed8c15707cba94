"""Conformance suites: the numbered contracts of the interfaces as tests that any implementation can subclass."""

import pytest

# Before the suites are imported, so that their plain asserts explain themselves in a stranger's test run too.
pytest.register_assert_rewrite(
    "spec_core.testing.backend_suite",
    "spec_core.testing.conformance",
    "spec_core.testing.draft_suite",
    "spec_core.testing.draft_workbench",
    "spec_core.testing.engine_suite",
    "spec_core.testing.kernels",
    "spec_core.testing.process_group_suite",
    "spec_core.testing.strategy_suite",
    "spec_core.testing.toy_training",
    "spec_core.testing.transport_endings",
    "spec_core.testing.transport_parts",
    "spec_core.testing.transport_stage",
    "spec_core.testing.transport_suite",
)

from spec_core.testing.backend_suite import BackendSuite  # noqa: E402
from spec_core.testing.draft_suite import DraftSuite  # noqa: E402
from spec_core.testing.engine_suite import EngineSuite  # noqa: E402
from spec_core.testing.kernels import assert_kernel_agrees  # noqa: E402
from spec_core.testing.process_group_suite import ProcessGroupSuite  # noqa: E402
from spec_core.testing.strategy_suite import StrategySuite  # noqa: E402
from spec_core.testing.transport_suite import TransportSuite  # noqa: E402

__all__ = [
    "BackendSuite",
    "DraftSuite",
    "EngineSuite",
    "ProcessGroupSuite",
    "StrategySuite",
    "TransportSuite",
    "assert_kernel_agrees",
]
