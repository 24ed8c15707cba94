"""``spec-trainer push`` and ``spec-trainer serving``: running servers get a draft, and say which one they serve."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from spec_core import Backend
from spec_core.errors import EngineError
from spec_core.plugins import load_available
from spec_trainer.draft_folder import check_draft
from spec_trainer.evaluation.finite import check_finite
from spec_trainer.push.servers import check_addresses, connect_servers, open_publisher
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
        version = publisher.next_version()
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
    check_addresses(urls)
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


def serving_problem(document: Mapping[str, Any]) -> str:
    """Return in one line why the servers of ``describe_serving`` do not all serve one draft; empty where they do."""
    if silent := [url for url, server in document.items() if "error" in server]:
        return f"{', '.join(silent)} did not say what it serves"
    if broken := [url for url, server in document.items() if server["state"] == "quarantined"]:
        return (
            f"{', '.join(broken)} may serve something else than it should; the next push to it settles that"
        )
    places: dict[str, list[str]] = {}
    for url, server in document.items():
        version = "no version" if server["version"] is None else f"version {server['version']}"
        places.setdefault(" ".join(filter(None, [version, server["digest"]])), []).append(url)
    if len(places) == 1:
        return ""
    differing = "; ".join(f"{draft} at {', '.join(urls)}" for draft, urls in places.items())
    return f"the servers differ: {differing}; the next spec-trainer push to all of them settles that"


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
