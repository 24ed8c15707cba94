"""Section ``follow`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from spec_core import Config
from spec_core.config import Seconds
from spec_trainer.configuration.server_url import ServerUrl

FOLLOW_DEFAULTS = {"train.schedule": "constant", "data.eval_samples": 0}
"""Defaults of ``spec-trainer follow``: training has no end, and drafts are judged by held-out requests."""


class RetentionConfig(Config):
    """Section ``follow.retention``: requests are kept in the run directory, too, so that a restart has them."""

    rows: NonNegativeInt = 0
    """Most requests that are kept on disk, the newest; 0 keeps none, and removes those of a command before."""
    bytes: PositiveInt = 64 << 20
    """Most bytes of their token ids, four for each token."""
    age_s: Seconds = 86_400.0
    """Longest time for which a request is kept on disk while the command runs."""


class FollowConfig(Config):
    """Section ``follow``: the draft learns from live requests of running servers (``spec-trainer follow``)."""

    servers: tuple[ServerUrl, ...] = ()
    """Addresses of the servers, such as http://127.0.0.1:8000; their secret is that of ``push.to``."""
    requests: PositiveInt | None = None
    """Live requests after which the command ends; by default it goes on until it is stopped."""
    every: PositiveInt = 64
    """New requests to train on before the draft trains on some and is judged."""
    passes: PositiveInt = 4
    """How often a request is trained on, about."""
    replay: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Share of the samples of each step that comes from section ``data``."""
    kept: PositiveInt = 4096
    """Most requests to train on that are kept, in memory; the oldest goes first."""
    half_life: PositiveInt = 1024
    """Requests after which one is trained on half as often."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.125
    """Share of the requests that drafts are judged by; a hash of the prompt decides."""
    window: Annotated[int, Field(ge=8)] = 128
    """Most requests that drafts are judged by, the newest."""
    poll_s: Seconds = 2.0
    """Time between two looks at servers that had too few requests."""
    capture: Literal["prefill", "serving"] = "prefill"
    """Who computes the features of requests: an engine of the command prefills them, or the servers capture them as
    they serve."""
    states_bytes: PositiveInt = 8 << 30
    """Most bytes of features that are kept in memory with ``capture=serving``; the oldest request goes first."""
    retention: RetentionConfig = RetentionConfig()
    latency_budget_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Training waits while the p99 inter-token latency of a server is above this; by default it never waits."""
    new_target: Literal["stop", "learn"] = "stop"
    """Response to changed files of the target: stop with one line, or learn from the new weights."""
    metrics: Annotated[str, Field(min_length=1)] | None = None
    """host:port of this host where Prometheus reads the run's figures, at /metrics; by default nowhere."""
