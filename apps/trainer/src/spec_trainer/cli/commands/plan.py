"""Build the result of ``spec-trainer plan``: the processes, devices, memory and schedule of a run."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

from spec_core.errors import SpecError
from spec_core.wording import counted
from spec_trainer.plan.expected_time import expected_time
from spec_trainer.plan.memory import RunSizes, rank_parts, rooms, shown_size
from spec_trainer.plan.warnings import run_warnings
from spec_trainer.push.servers import open_transports
from spec_trainer.run.dispatch import sample_bytes
from spec_trainer.run.serving import serving_engines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_trainer.run.spec import RunSpec


_OF_BYTES = {"parts", "rank_memory"}
"""Keys of a plan whose values are numbers of bytes, by what they are for."""


def describe_run(run: RunSpec) -> dict[str, Any]:
    """Return a description of ``run`` as a JSON-serializable dict."""
    config = run.config
    sizes = RunSizes(run)
    return {
        "target": str(run.target.folder),
        "architecture": run.target.architecture,
        "draft": config.draft.name,
        "served_by": _served_by(run),
        "captured_layers": list(run.schema.layers),
        **_layers_run(run),
        "features": config.data.features or f"from engine {config.engine.name}",
        "features_bytes_per_token": run.schema.sent.bytes_per_token(),
        "features_bytes": sum(sample_bytes(run.schema, length) for length in run.dataset.lengths.values()),
        "samples": len(run.dataset.train),
        "held_out_samples": len(run.dataset.held_out),
        "tokens_per_epoch": run.dataset.total_tokens,
        "data": str(run.dataset.report),
        "steps": run.schedule.total_steps,
        "passes_per_step": config.train.accumulation,
        "optimizer": config.optimizer.model_dump(mode="json"),
        "strategy": config.strategy.model_dump(mode="json"),
        "placement": config.placement.kind,
        "processes": _processes(run),
        "window_bytes": run.window_bytes,
        **_device_memory(run),
        "resources": _resources(run, sizes),
        "rank_memory": {part.what: part.num_bytes for part in rank_parts(run, sizes)},
        "expected_time": expected_time(run),
        **({"push": _pushes(run)} if config.train.push_every else {}),
        **({"serve": _measuring(run)} if config.train.serve_every else {}),
        **({"decode": _decoding(run)} if config.decode.every else {}),
        "frozen_tensor_bytes": sizes.frozen_bytes,
        "warnings": run_warnings(run, sizes),
        "output": str(config.output),
        "identity": run.identity,
    }


def with_sizes(plan: Mapping[str, Any], are_bytes: bool = False) -> dict[str, Any]:
    """Return a plan for people to read: with numbers of bytes as text, in GiB or MiB."""
    shown: dict[str, Any] = {}
    for key, value in plan.items():
        is_bytes = are_bytes or key.endswith("_bytes") or key in _OF_BYTES
        if isinstance(value, dict):
            shown[key] = with_sizes(cast("dict[str, Any]", value), is_bytes)
        else:
            shown[key] = shown_size(value) if is_bytes and isinstance(value, int) else value
    return shown


def _served_by(run: RunSpec) -> dict[str, str]:
    """Return the engines that can serve the draft, each with its version here, or else with what is missing."""
    return {
        name: offer.reason or " ".join(itertools.chain(*offer.versions.items()))
        for name, offer in serving_engines(run.target, run.draft).items()
        if not isinstance(offer, SpecError)
    }


def _layers_run(run: RunSpec) -> dict[str, str]:
    """Return how many of the target's layers a capture runs, if the engine leaves some out."""
    highest = max(run.schema.layers)
    every = run.target.num_layers
    runs = run.config.data.features is None
    if highest == every or not runs or not run.engine_type.abilities.stops_early:
        return {}
    return {"layers_run": f"{highest} of {every}, which saves {1 - highest / every:.1%} of them"}


def _resources(run: RunSpec, sizes: RunSizes) -> dict[str, Any]:
    """Return needed and free bytes of memory and disk. Raise ConfigError if the run does not fit."""
    found = rooms(run, sizes)
    for room in found:
        room.check()
    return {room.name: room.document() for room in found}


def _processes(run: RunSpec) -> list[str]:
    config = run.config
    where = f"backend {config.backend.name}"
    replicas = range(config.engine.replicas if config.data.features is None else 0)
    if config.placement.kind == "inline":
        engine = f"engine {config.engine.name} and " if replicas else ""
        return [f"this process: {engine}trainer rank 0 ({config.strategy.name}), {where}"]
    engines = [f"engine {config.engine.name} replica {index}, {where}" for index in replicas]
    if config.decodes:
        decoders = range(config.decode.replicas)
        engines += [f"engine {config.engine.name} that decodes {index}, {where}" for index in decoders]
    shares = run.schedule.settings.data_parallel_ranks
    ranks = [f"trainer rank {rank} ({_parallel(run, share)}), {where}" for rank, share in enumerate(shares)]
    hosts = [f", host {member.host}" if member.host else "" for member in run.members()]
    return [process + host for process, host in zip(engines + ranks, hosts, strict=True)]


def _pushes(run: RunSpec) -> str:
    config = run.config
    servers = ", ".join(config.push.to) or "the run's own engine"
    transports = open_transports(run.backend, config.push)
    which = "the first" if config.push.transport else "what is fastest there"
    return f"{_every(config.train.push_every)} to {servers}, by {which} of {', '.join(transports)}"


def _decoding(run: RunSpec) -> str:
    decode = run.config.decode
    return f"{_every(decode.every)}, {counted(decode.prompts, 'prompt')}{_answers(run)}"


def _measuring(run: RunSpec) -> str:
    prompts = counted(len(run.serving_prompts), "held-out prompt")
    return f"{_every(run.config.train.serve_every)} in the run's own engine, {prompts}{_answers(run)}"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _answers(run: RunSpec) -> str:
    most = run.config.decode.max_new_tokens
    return f" with {counted(run.num_draft_tokens, 'draft token')}, {counted(most, 'new token')} at most"


def _parallel(run: RunSpec, share: int) -> str:
    """Return the strategy's name; if ranks train the same samples, also a process's data-parallel rank.

    ``share``: the data-parallel rank.
    """
    name = run.config.strategy.name
    num_shares = run.schedule.num_shares
    if num_shares == run.config.train.ranks:
        return name
    return f"{name}, data-parallel rank {share} of {num_shares}"


def _device_memory(run: RunSpec) -> dict[str, Any]:
    """Return each process's limit of device memory in bytes; empty if there are no limits.

    The limit does not include ``uncounted_bytes`` (see ``MemoryBudget``).
    """
    capabilities = run.backend.capabilities()
    limited = [member for member in run.members() if member.memory_fraction is not None]
    if not limited or capabilities.device_bytes is None:
        return {}
    processes = {
        member.name: {
            "devices": list(member.devices),
            "limit_bytes": int((member.memory_fraction or 0) * capabilities.device_bytes),
            "uncounted_bytes": member.uncounted_bytes,
        }
        for member in limited
    }
    return {"device_bytes": capabilities.device_bytes, "device_memory": processes}
