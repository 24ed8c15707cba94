"""Run the commands ``push`` (send a draft to running servers) and ``serving`` (show served drafts)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError
from spec_core.wording import one_line
from spec_trainer.base.hub import resolve_target
from spec_trainer.base.option_values import check_timeout
from spec_trainer.configuration.push_options import read_transport_options, transport_configs
from spec_trainer.push.publish import publish_draft
from spec_trainer.push.servers import ask_servers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spec_kit.hosting import HttpReplica
    from spec_kit.weight_sync import PublishReport
    from spec_trainer.push.request import PushRequest


def push_draft(request: PushRequest, words: Sequence[str] = ()) -> dict[str, Any]:
    """Push a draft with a version number higher than any server's; return the document of ``push --json``.

    ``words``: options of weight transports, ``push.options.NAME.KEY=VALUE``. Raise UsageError, with a message of one
    line, for a problem found before any server was asked to receive.
    """
    from spec_kit.targets.target_reader import read_target

    request = replace(request, options=read_transport_options(words))
    transport_configs(request.options, "options")
    target = read_target(resolve_target(request.target))
    return _document(publish_draft(request.draft_model, target, request.to, request, request.backend))


def push_lines(document: Mapping[str, Any]) -> Iterable[str]:
    """Yield a line of text for each server of a push."""
    for url, outcome in document["servers"].items():
        way = f" by {outcome['transport']}{_others(outcome['not_taken'])}" if outcome["transport"] else ""
        reason = f": {one_line(outcome['reason'])}" if outcome["reason"] else ""
        yield (
            f"{url}  {outcome['state']}  version {document['version']}{way}"
            f"  {sum(outcome['seconds'].values()):.2f} s{reason}"
        )


def _others(not_taken: Mapping[str, str]) -> str:
    """Return the reasons why other transports were not used, in parentheses; empty if there are none."""
    reasons = "; ".join(f"not {name}: {reason}" for name, reason in not_taken.items())
    return f" ({one_line(reasons)})" if reasons else ""


def describe_serving(urls: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Return address -> status of the served draft, or the error if the server does not answer."""
    check_timeout(timeout_s)
    return {url: _describe(server) for url, server in ask_servers(urls, timeout_s).items()}


def serving_lines(document: Mapping[str, Any]) -> Iterable[str]:
    """Yield a line of text for each server of ``describe_serving``."""
    for url, server in document.items():
        if "error" in server:
            yield f"{url}  {one_line(server['error'])}"
            continue
        version = "no version" if server["version"] is None else f"version {server['version']}"
        parts = [url, version, one_line(server["digest"]), server["state"]]
        if server["rounds"]:
            parts.append(f"tau {server['acceptance_length']:.2f} over {server['rounds']:,} rounds")
        yield "  ".join(filter(None, [*parts, server["reason"]]))


def serving_problem(document: Mapping[str, Any]) -> str:
    """Return one line that says why the servers do not all serve the same draft; empty if they do."""
    if silent := [url for url, server in document.items() if "error" in server]:
        return f"{', '.join(silent)} did not say what it serves"
    if broken := [url for url, server in document.items() if server["state"] == "quarantined"]:
        return (
            f"{', '.join(broken)} may serve something else than it should; the next push to it settles that"
        )
    servers_of: dict[str, list[str]] = {}
    for url, server in document.items():
        version = "no version" if server["version"] is None else f"version {server['version']}"
        servers_of.setdefault(" ".join(filter(None, [version, server["digest"]])), []).append(url)
    if len(servers_of) == 1:
        return ""
    differing = "; ".join(f"{draft} at {', '.join(urls)}" for draft, urls in servers_of.items())
    return f"the servers differ: {differing}; the next spec-trainer push to all of them settles that"


def _document(report: PublishReport) -> dict[str, Any]:
    return {
        "version": report.version,
        "digest": report.digest,
        "committed": all(outcome.state == "committed" for outcome in report.replicas.values()),
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


def _describe(server: HttpReplica | EngineError) -> dict[str, Any]:
    if isinstance(server, EngineError):
        return {"error": str(server)}
    status, counted = server.first_answer.status, server.first_answer.acceptance
    return {
        "version": status.version,
        "digest": status.digest,
        "state": status.state,
        "reason": status.reason,
        "rounds": counted.rounds,
        "acceptance_length": counted.acceptance_length if counted.rounds else None,
        "acceptance_per_position": counted.acceptance_per_position,
    }
