"""This module defines section ``follow`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from spec_core import Config
from spec_core.config import Seconds
from spec_trainer.configuration.server_url import ServerUrls

FOLLOW_DEFAULTS = {"train.schedule": "constant", "data.eval_samples": 0}
"""Defaults of ``spec-trainer follow``: training has no end, and drafts are judged by held-out requests."""


class RetentionConfig(Config):
    """Section ``follow.retention``: live requests are kept on disk, too, so that a restart has them."""

    rows: NonNegativeInt = 0
    """Largest number of requests that are kept on disk, newest first; 0 keeps none, and removes the requests of
    earlier commands."""
    bytes: PositiveInt = 64 << 20
    """Largest number of bytes of the kept requests' token ids; a token takes 4 bytes."""
    age_s: Seconds = 86_400.0
    """Longest time, in seconds, for which a request is kept on disk while the command runs."""


class ServeConfig(Config):
    """Section ``follow.serve``: a server that the command starts itself, and ends when it ends."""

    engine: str | None = None
    """Engine whose program serves the target with the draft, such as vllm; by default none."""
    address: str = "127.0.0.1:8000"
    """host:port at which the server listens."""
    arguments: str = ""
    """Further words of the server's command line, as in a shell, such as --max-model-len 4096."""
    start_s: Seconds = 900.0
    """Longest time until the server first answers."""


class FollowConfig(Config):
    """Section ``follow``: ``spec-trainer follow`` trains a draft on live requests of running servers."""

    servers: ServerUrls = ()
    """Addresses of the servers, such as http://127.0.0.1:8000. Their secret is in the environment variable
    SPEC_DRAFT_TOKEN."""
    serve: ServeConfig = ServeConfig()
    requests: PositiveInt | None = None
    """Live requests after which the command ends; by default it goes on until it is stopped."""
    every: PositiveInt = 64
    """Number of new training requests that start the next cycle of training and judging."""
    passes: PositiveInt = 4
    """Approximate number of times that a request is trained on."""
    replay: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Share of a cycle's training samples that comes from the data of section ``data``."""
    kept: PositiveInt = 4096
    """Largest number of training requests that are kept in memory; the oldest is removed first."""
    half_life: PositiveInt = 1024
    """Number of newer requests after which a request is trained on half as often."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.125
    """Share of the requests that are held out to judge drafts; a hash of the prompt decides."""
    window: Annotated[int, Field(ge=8)] = 128
    """Largest number of held-out requests by which drafts are judged; the newest are kept."""
    poll_s: Seconds = 2.0
    """Time between two queries of the servers if they had too few requests."""
    capture: Literal["prefill", "serving"] = "prefill"
    """Source of the features of requests: prefill: an engine of the command computes them; serving: the servers
    capture them while they serve."""
    states_bytes: PositiveInt = 8 << 30
    """Largest number of bytes of features that are kept in memory with ``capture=serving``; the oldest request is
    removed first."""
    retention: RetentionConfig = RetentionConfig()
    latency_budget_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Training waits while the p99 inter-token latency of a server is above this value; by default it never waits."""
    new_target: Literal["stop", "learn"] = "stop"
    """Response to changed files of the target: stop with one line, or learn from the new weights."""
    metrics: Annotated[str, Field(min_length=1)] | None = None
    """host:port of this host where Prometheus reads the run's figures, at /metrics; by default nowhere."""
