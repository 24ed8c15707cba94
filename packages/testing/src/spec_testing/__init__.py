"""This package has conformance suites: test classes for the contracts of the plugin interfaces.

A plugin's tests subclass a suite. A suite is imported on first access, so that the workers of LauncherSuite do not
import torch.
"""

from typing import TYPE_CHECKING

import pytest

from spec_kit.lazy import lazy_names

# Before the suites are imported, so that their plain asserts explain themselves in a third party's test run too.
pytest.register_assert_rewrite(
    "spec_testing.answer_checks",
    "spec_testing.backend_suite",
    "spec_testing.conformance",
    "spec_testing.draft_export_suite",
    "spec_testing.draft_replica_suite",
    "spec_testing.draft_suite",
    "spec_testing.draft_workbench",
    "spec_testing.engine_capture_suite",
    "spec_testing.engine_images_suite",
    "spec_testing.engine_suite",
    "spec_testing.kernels",
    "spec_testing.launcher_bench",
    "spec_testing.launcher_suite",
    "spec_testing.optimizer_suite",
    "spec_testing.process_group_ranks",
    "spec_testing.process_group_suite",
    "spec_testing.serving_checks",
    "spec_testing.strategy_suite",
    "spec_testing.toy_training",
    "spec_testing.tracker_suite",
    "spec_testing.transport_endings",
    "spec_testing.transport_parts",
    "spec_testing.transport_stage",
    "spec_testing.transport_suite",
    "spec_testing.weight_faults",
    "spec_testing.weight_stage",
    "spec_testing.weight_transport_suite",
)

if TYPE_CHECKING:
    from spec_testing.answer_checks import ReferenceTarget
    from spec_testing.backend_suite import BackendSuite
    from spec_testing.draft_replica_suite import DraftReplicaSuite
    from spec_testing.draft_suite import DraftSuite
    from spec_testing.drawn_draft import draw_draft
    from spec_testing.engine_images_suite import EngineImagesSuite, SampleWithImages
    from spec_testing.engine_suite import EngineSuite
    from spec_testing.kernels import assert_kernel_agrees
    from spec_testing.launcher_suite import LauncherSuite
    from spec_testing.optimizer_suite import OptimizerSuite
    from spec_testing.process_group_suite import ProcessGroupSuite
    from spec_testing.reference import reference_backend, reference_kernel
    from spec_testing.serving_suite import ServingSuite
    from spec_testing.strategy_suite import StrategySuite
    from spec_testing.tracker_suite import TrackerSuite
    from spec_testing.transformers_target import TransformersTarget
    from spec_testing.transport_suite import TransportSuite
    from spec_testing.weight_stage import BUCKET_BYTES
    from spec_testing.weight_transport_suite import WeightTransportSuite

__all__ = [
    "BUCKET_BYTES",
    "BackendSuite",
    "DraftReplicaSuite",
    "DraftSuite",
    "EngineImagesSuite",
    "EngineSuite",
    "LauncherSuite",
    "OptimizerSuite",
    "ProcessGroupSuite",
    "ReferenceTarget",
    "SampleWithImages",
    "ServingSuite",
    "StrategySuite",
    "TrackerSuite",
    "TransformersTarget",
    "TransportSuite",
    "WeightTransportSuite",
    "assert_kernel_agrees",
    "draw_draft",
    "reference_backend",
    "reference_kernel",
]

__getattr__ = lazy_names(__name__, __file__)
