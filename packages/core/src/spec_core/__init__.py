"""This package has the contract of plugins: interfaces, records, errors and the plugin loader.

Importing it does not import torch.
"""

from spec_core.backend import Backend, Placement, Role
from spec_core.config import (
    BackendConfig,
    Config,
    DraftConfig,
    EngineConfig,
    LauncherConfig,
    OptimizerConfig,
    StrategyConfig,
    WeightTransportConfig,
)
from spec_core.context_group import ContextGroup
from spec_core.draft import Draft, DraftCost, Proposal, Proposer
from spec_core.draft_replica import LARGEST_VERSION, DraftReplica, ServingStatus, UpdateId, UpdateRequest
from spec_core.engine import Engine, EngineAbilities, EngineContext, FrozenProducts
from spec_core.foreign import foreign_errors, read_json_object
from spec_core.host_tensors import to_device_async
from spec_core.kernels import FindKernel, Kernel, KernelSet, no_kernel
from spec_core.launcher import (
    LOOPBACK,
    LaunchContext,
    Launcher,
    Message,
    RunLink,
    WorkerEnded,
    WorkerHandle,
    WorkerMain,
    WorkerMessage,
    WorkerSpec,
)
from spec_core.ops import LinearWeight, VocabularyOps
from spec_core.optimizer import MapWhole, Optimizer, TrainedWeight, WeightShape, map_here
from spec_core.process_group import ProcessGroup
from spec_core.rendezvous import Rendezvous
from spec_core.serving import Serving
from spec_core.state_folder import StateFolder
from spec_core.strategy import DataParallel, ShardCounts, StepConfig, Strategy, TrainStep
from spec_core.target import TargetSpec, TargetTensors
from spec_core.target_type import TargetType, TargetValues
from spec_core.tracker import Tracker
from spec_core.transport import FeatureReceiver, FeatureSender, Transport
from spec_core.weight_manifest import Manifest
from spec_core.weight_transport import WeightMedium, WeightReceiver, WeightSender, WeightTransport

__all__ = [
    "LARGEST_VERSION",
    "LOOPBACK",
    "Backend",
    "BackendConfig",
    "Config",
    "ContextGroup",
    "DataParallel",
    "Draft",
    "DraftConfig",
    "DraftCost",
    "DraftReplica",
    "Engine",
    "EngineAbilities",
    "EngineConfig",
    "EngineContext",
    "FeatureReceiver",
    "FeatureSender",
    "FindKernel",
    "FrozenProducts",
    "Kernel",
    "KernelSet",
    "LaunchContext",
    "Launcher",
    "LauncherConfig",
    "LinearWeight",
    "Manifest",
    "MapWhole",
    "Message",
    "Optimizer",
    "OptimizerConfig",
    "Placement",
    "ProcessGroup",
    "Proposal",
    "Proposer",
    "Rendezvous",
    "Role",
    "RunLink",
    "Serving",
    "ServingStatus",
    "ShardCounts",
    "StateFolder",
    "StepConfig",
    "Strategy",
    "StrategyConfig",
    "TargetSpec",
    "TargetTensors",
    "TargetType",
    "TargetValues",
    "Tracker",
    "TrainStep",
    "TrainedWeight",
    "Transport",
    "UpdateId",
    "UpdateRequest",
    "VocabularyOps",
    "WeightMedium",
    "WeightReceiver",
    "WeightSender",
    "WeightShape",
    "WeightTransport",
    "WeightTransportConfig",
    "WorkerEnded",
    "WorkerHandle",
    "WorkerMain",
    "WorkerMessage",
    "WorkerSpec",
    "foreign_errors",
    "map_here",
    "no_kernel",
    "read_json_object",
    "to_device_async",
]
