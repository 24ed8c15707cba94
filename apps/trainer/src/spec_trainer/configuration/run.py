"""This module defines the run configuration: every section, key and default.

Sections that have a ``name`` (``SECTIONS``) belong to the plugins that they name:
``run_config_type`` puts the plugins' own ``Config`` classes in, so one strict validation covers the whole file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from spec_core import (
    BackendConfig,
    Config,
    DraftConfig,
    EngineConfig,
    LauncherConfig,
    OptimizerConfig,
    StepConfig,
    StrategyConfig,
    plugins,
)
from spec_core.config import Seconds
from spec_trainer.configuration.data import DataConfig
from spec_trainer.configuration.follow import FollowConfig
from spec_trainer.configuration.push_options import TransportOptions
from spec_trainer.configuration.server_url import ServerUrls
from spec_trainer.configuration.track import TrackConfig

SECTIONS: dict[str, type[Any]] = {
    plugins.kind_of(interface): interface
    for interface in plugins.INTERFACES
    if "name" in interface.Config.model_fields
}
"""Section -> interface of the plugin that the section names; a section has the name of its kind of plugin."""

B = TypeVar("B", bound=BackendConfig)
D = TypeVar("D", bound=DraftConfig)
U = TypeVar("U", bound=OptimizerConfig)
S = TypeVar("S", bound=StrategyConfig)
E = TypeVar("E", bound=EngineConfig)
L = TypeVar("L", bound=LauncherConfig)
K = TypeVar("K", bound=TrackConfig)

Fraction = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


def _named(path: object) -> object:
    """Raise ValueError if a path is empty, usually because a shell variable is not set.

    pathlib would read an empty path as the working directory.
    """
    if path == "":
        raise ValueError("is empty, expected a folder")
    return path


class TrainConfig(StepConfig):
    """Section ``train``: schedule, batch, and steps between checkpoints, evaluations and pushes."""

    ranks: Annotated[int, Field(ge=1, le=65536)] = 1
    """Number of trainer processes."""
    steps: PositiveInt | None = None
    """Number of optimizer steps of the run; overrides ``epochs``."""
    epochs: PositiveInt = 1
    """Number of passes over the training data."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up; wsd holds the peak and decays linearly at the end."""
    warmup_steps: NonNegativeInt = 20
    """Number of steps of linear warm-up."""
    decay_share: Fraction = 0.2
    """Share of all steps that ``wsd`` spends decaying at the end."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end, as a share of the peak."""
    accumulation: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Number of micro-batches (forward and backward passes) into which each rank divides its share of a
    global batch. If it is not set, a new run uses the smallest number whose activations fit the device, as
    far as these can be estimated, and otherwise 1."""
    global_batch_tokens: PositiveInt = 16384
    """Tokens of one optimizer step without padding, summed over all ranks and micro-batches."""
    balance: Literal["cost", "tokens"] = "cost"
    """Quantity that is divided evenly over ranks and micro-batches: cost: the computation, as the draft
    estimates it for each sample; tokens: the tokens."""
    fp8: Literal["frozen", "layers"] | None = None
    """Matrix products that are computed in 8-bit floating point: frozen: products with the target's head;
    layers: also the draft's linear layers. Needs ``train.dtype=bfloat16``."""
    save_every: PositiveInt = 500
    """Steps between checkpoints; the last step and a new best are also saved."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best one."""
    resume_from: Annotated[str, Field(pattern=r"^(latest|previous|step-\d+)$")] = "latest"
    """Checkpoint from which this command resumes: latest (a run that has none begins), previous (the newest undamaged
    one before the latest) or step-N."""
    restarts: NonNegativeInt = 0
    """How many times the command starts again, from the newest checkpoint that it has written, after a run of
    several processes has failed."""
    eval_every: NonNegativeInt = 0
    """Steps between held-out evaluations; 0 evaluates only at the end."""
    serve_every: NonNegativeInt = 0
    """Steps between measurements of the draft. The run's own engine serves the draft and answers held-out
    prompts, with the settings of section ``decode``. The draft of the last step is also measured."""
    push_every: NonNegativeInt = 0
    """Steps between pushes of the draft to the running servers of ``push.to``, or to the run's own engine if
    it decodes (``decode.every``). The draft of the last step is also pushed."""


class PlacementConfig(Config):
    """Section ``placement``: where engine and trainer run."""

    kind: Literal["inline", "colocated", "disaggregated"] = "inline"
    """inline: one process; colocated: engine and trainer processes share devices; disaggregated: they have
    separate devices. For an engine that has processes of its own (vllm, sglang), the default is colocated."""
    trainer_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each device that the trainer gets; colocated only."""
    engine_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each device that the engine gets; colocated only."""
    window_bytes: PositiveInt | None = None
    """Largest number of bytes of features in flight to one trainer rank. By default enough for two global
    batches or, if that is less, for the rank's shares of sixteen, and always for two of the longest samples."""


class CaptureConfig(Config):
    """Section ``capture``: the folder that ``spec-trainer capture`` writes."""

    shard_bytes: PositiveInt = 1 << 30
    """Largest number of bytes of features in one file; a larger sample gets a file of its own."""


class PushConfig(Config):
    """Section ``push``: running servers that get the draft every ``train.push_every`` training steps."""

    to: ServerUrls = ()
    """Addresses of the servers, such as http://127.0.0.1:8000. Their secret is not written here: the environment
    variable SPEC_DRAFT_TOKEN holds it."""
    transport: tuple[Name, ...] = ()
    """Weight transports, the preferred one first. By default the fastest installed transport for each
    server."""
    bucket_bytes: Annotated[int, Field(ge=4096)] | None = None
    """Largest number of bytes of weights that are sent at once. By default each transport's own value, which is 256
    MiB for this project's transports."""
    folder: Annotated[Path | None, BeforeValidator(_named)] = None
    """Folder in which weight transports that send files keep the newest versions. Servers must see it under
    the same path. By default a temporary folder on this host."""
    options: TransportOptions = Field(default_factory=dict)
    """Options of single weight transports, such as ``push.options.NAME.KEY=VALUE``."""
    address: Name = "127.0.0.1:0"
    """host:port at which servers reach the trainer; port 0 is any free one."""
    timeout_s: Seconds = 60.0
    """Longest time for one push, in seconds."""
    canary_margin: PositiveFloat | None = None
    """A pushed version is reverted if the acceptance length falls by more than this number of tokens and
    chance cannot explain the fall. By default no version is reverted."""
    canary_rounds: PositiveInt = 1000
    """Verifications on live traffic, summed over servers, after which a version stays if chance may explain the
    fall."""


class DecodeConfig(Config):
    """Section ``decode``: the run's engine answers prompts, for training or to measure the draft."""

    every: NonNegativeInt = 0
    """Optimizer steps of one cycle, which trains on new answers; 0 trains on the data as it is. The engine
    gets the draft every ``train.push_every`` steps."""
    prompts: PositiveInt = 64
    """Number of prompts that are answered for a cycle, taken in turn from the training data, in a new order on each
    pass. With ``train.serve_every``: largest number of held-out prompts that are answered for a measurement."""
    max_new_tokens: PositiveInt = 256
    """Largest number of tokens of an answer."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """1 samples from the target's own distribution, 0 is greedy."""
    top_p: Fraction = 1.0
    """Sample from the most likely tokens that together have this probability."""
    num_draft_tokens: PositiveInt | None = None
    """Number of tokens that the draft proposes per round. By default all that it guesses in one pass (block drafts,
    P-EAGLE); else 4, or as many as it was trained to guess ahead if that is less."""
    replicas: Annotated[int, Field(ge=1, le=65536)] = 1
    """Number of engines that decode, each in a process of its own, besides the ``engine.replicas`` engines
    that capture features. With ``placement.kind=inline`` the run's one engine does both."""
    on_policy: bool = False
    """Only guesses that the engine's draft made and the target judged carry loss: the accepted guesses of
    every round, and the first rejected one."""


class TimeoutsConfig(Config):
    """Section ``timeouts``, in seconds."""

    start_s: Seconds = 600.0
    """Longest time, in seconds, for an engine or a trainer process to be ready."""
    peer_s: Seconds = 120.0
    """Seconds of silence after which another process of the run counts as lost."""
    step_s: Seconds = 1800.0
    """Longest time, in seconds, for the features of one step to arrive."""


class ProfileConfig(Config):
    """Section ``profile``: profiles of single steps."""

    steps: tuple[NonNegativeInt, ...] = ()
    """Steps, counted from 0, whose torch profile of rank 0 is written into the run directory."""


class RunConfig(Config, Generic[B, D, U, S, E, L, K]):
    """The complete configuration of a run; ``config.yaml`` of the run directory holds it fully resolved."""

    target: Name
    """Folder or hub id of the target."""
    output: Annotated[Path, BeforeValidator(_named)]
    """Run directory; by default runs/ and the stem of the configuration file or the name of the target."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the data order, and all random numbers that a draft draws."""
    backend: B = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    data: DataConfig = DataConfig()
    draft: D = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    train: TrainConfig = TrainConfig()
    optimizer: U = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    strategy: S = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    engine: E = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    placement: PlacementConfig = PlacementConfig()
    capture: CaptureConfig = CaptureConfig()
    push: PushConfig = PushConfig()
    decode: DecodeConfig = DecodeConfig()
    follow: FollowConfig = FollowConfig()
    launcher: L = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    timeouts: TimeoutsConfig = TimeoutsConfig()
    track: K = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    profile: ProfileConfig = ProfileConfig()

    @property
    def decodes(self) -> bool:
        """Whether engines of the run decode, either to train on the answers or to measure the draft."""
        return bool(self.decode.every or self.train.serve_every)


AnyRunConfig = RunConfig[
    BackendConfig, DraftConfig, OptimizerConfig, StrategyConfig, EngineConfig, LauncherConfig, TrackConfig
]


def run_config_type(
    backend: type[BackendConfig] = BackendConfig,
    draft: type[DraftConfig] = DraftConfig,
    strategy: type[StrategyConfig] = StrategyConfig,
    engine: type[EngineConfig] = EngineConfig,
    launcher: type[LauncherConfig] = LauncherConfig,
    optimizer: type[OptimizerConfig] = OptimizerConfig,
    track: type[TrackConfig] = TrackConfig,
) -> type[AnyRunConfig]:
    """Return the run configuration for the plugins that a run names."""
    return RunConfig[backend, draft, optimizer, strategy, engine, launcher, track]  # type: ignore[valid-type,return-value]
