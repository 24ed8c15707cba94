"""Convert the figures of a run that follows servers to metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_trainer.live.metrics_page import Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_trainer.live.reservoir import Reservoir
    from spec_trainer.live.traffic import Traffic


@dataclass(frozen=True)
class Progress:
    """Numbers that show how far a run that follows servers has come, and how good its drafts are."""

    steps: int
    verdicts: int
    pushes: int
    waited_s: float
    served_step: int
    acceptance_lengths: Mapping[str, float]
    """Acceptance length in the last verdict of the drafts ``trained``, ``start``, and ``served`` since then."""
    by_label: Mapping[str, float]
    """Acceptance length in the last verdict of the draft served since then, by the requests' label."""


def run_metrics(
    servers: Sequence[str], traffic: Traffic, reservoir: Reservoir, progress: Progress
) -> list[Metric]:
    """Return every metric of a run."""
    left_out = traffic.left_out + reservoir.left_out
    versions = traffic.versions
    return [
        Metric("requests_total", "counter", "Live requests that came.", reservoir.num_new),
        Metric(
            "label_requests_total", "counter", "Live requests that came, by label.",
            reservoir.labels.requests, "label"),
        Metric("left_out_total", "counter", "Requests that nothing is learnt from.", left_out, "reason"),
        Metric("steps", "gauge", "Optimizer steps of the run.", progress.steps),
        Metric("verdicts_total", "counter", "Comparisons of drafts.", progress.verdicts),
        Metric("pushes_total", "counter", "Drafts that servers took.", progress.pushes),
        Metric(
            "waited_seconds_total", "counter", "Seconds that training waited for the latency budget.",
            progress.waited_s),
        Metric("served_step", "gauge", "Steps of the served draft.", progress.served_step),
        Metric(
            "acceptance_length", "gauge", "Simulated tokens per verification, by the last verdict.",
            progress.acceptance_lengths, "draft"),
        Metric(
            "label_acceptance_length", "gauge", "Simulated tokens per verification of the served draft, by label.",
            progress.by_label, "label"),
        Metric(
            "server_up", "gauge", "Whether the server answered last.",
            {url: int(url in versions) for url in servers}, "server"),
        Metric(
            "server_version", "gauge", "Version of the draft that the server serves; 0 is the first one.",
            {url: version or 0 for url, version in versions.items()}, "server"),
        Metric(
            "server_acceptance_length", "gauge", "Tokens per verification since the server's draft changed.",
            traffic.acceptance_lengths, "server"),
    ]  # fmt: skip
