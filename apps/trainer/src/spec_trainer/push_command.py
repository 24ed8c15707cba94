"""``spec-trainer push`` and ``spec-trainer serving``: running servers get a draft, and say which one they serve."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from spec_core import Backend
from spec_core.drafting.draft_files import check_finite
from spec_core.errors import EngineError
from spec_core.plugins import load_available
from spec_trainer.draft_folder import check_draft
from spec_trainer.push.servers import connect_servers, open_publisher
from spec_trainer.resolve import resolve_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spec_core.hosting import HttpReplica
    from spec_core.weight_sync import PublishReport
    from spec_trainer.push.request import PushRequest


def push_draft(request: PushRequest) -> dict[str, Any]:
    """Publish the draft as one version more than any of the servers has; return the document of ``push --json``.

    Raise UsageError, one line, for anything that is wrong before a server was asked to receive.
    """
    from safetensors.torch import load_file

    from spec_core.targets.target_reader import read_target

    target = read_target(resolve_target(request.target))
    check_draft(request.draft_model, target, None)
    check_finite(request.draft_model)
    backend_type = load_available(Backend, request.backend)
    backend = backend_type(backend_type.Config())
    with ExitStack() as stack:
        publisher = stack.enter_context(open_publisher(backend, request, target, backend.device(0)))
        for url, server in connect_servers(request.to).items():
            stack.enter_context(server)  # closed first: the publisher waits for no answer then
            publisher.add(url, server).result()
        weights = load_file(request.draft_model / "model.safetensors")
        versions = [status.version for status in publisher.serving().values()]
        version = 1 + max((version for version in versions if version is not None), default=0)
        report = publisher.publish(
            version, weights, policy=request.policy, timeout_s=request.timeout_s
        ).result()
    return _document(report)


def push_lines(document: Mapping[str, Any]) -> Iterable[str]:
    """Yield a line for each server of a push."""
    for url, outcome in document["servers"].items():
        way = f" by {outcome['transport']}{_others(outcome['not_taken'])}" if outcome["transport"] else ""
        reason = f": {outcome['reason']}" if outcome["reason"] else ""
        yield (
            f"{url}  {outcome['state']}  version {document['version']}{way}"
            f"  {sum(outcome['seconds'].values()):.2f} s{reason}"
        )


def _others(not_taken: Mapping[str, str]) -> str:
    """Return why other transports were not used, in parentheses."""
    reasons = "; ".join(f"not {name}: {reason}" for name, reason in not_taken.items())
    return f" ({reasons})" if reasons else ""


def describe_serving(urls: Sequence[str]) -> dict[str, Any]:
    """Return what each server says of the draft that it serves, or the error of one that does not answer."""
    return {url: _describe(url) for url in urls}


def serving_lines(document: Mapping[str, Any]) -> Iterable[str]:
    """Yield a line for each server of ``describe_serving``."""
    for url, server in document.items():
        if "error" in server:
            yield f"{url}  {server['error']}"
            continue
        version = "no version" if server["version"] is None else f"version {server['version']}"
        parts = [url, version, server["digest"], server["state"]]
        if server["rounds"]:
            parts.append(f"tau {server['acceptance_length']:.2f} over {server['rounds']:,} rounds")
        yield "  ".join(filter(None, [*parts, server["reason"]]))


def _document(report: PublishReport) -> dict[str, Any]:
    return {
        "version": report.version,
        "digest": report.digest,
        "committed": report.committed,
        "bytes": report.num_bytes,
        "seconds": dict(report.seconds),
        "servers": {
            url: {
                "state": outcome.state,
                "transport": outcome.transport,
                "not_taken": dict(outcome.not_taken),
                "reason": outcome.reason,
                "seconds": dict(outcome.seconds),
            }
            for url, outcome in report.replicas.items()
        },
    }


def _describe(url: str) -> dict[str, Any]:
    try:
        return _served_by(connect_servers([url])[url])
    except EngineError as error:
        return {"error": str(error)}


def _served_by(server: HttpReplica) -> dict[str, Any]:
    status, counted = server.status().result(), server.acceptance()
    return {
        "version": status.version,
        "digest": status.digest,
        "state": status.state,
        "reason": status.reason,
        "rounds": counted.rounds,
        "acceptance_length": counted.acceptance_length if counted.rounds else None,
        "acceptance_per_position": counted.acceptance_per_position,
    }
