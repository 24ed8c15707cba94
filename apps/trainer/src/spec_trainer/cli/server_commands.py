"""This module defines the commands for running servers: push, serving and follow. It imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from spec_trainer.base.words import check_overrides
from spec_trainer.cli.documents import print_document, print_lines
from spec_trainer.cli.examples import EXAMPLES
from spec_trainer.cli.exit_codes import failed
from spec_trainer.cli.last_resort import Leave, unforeseen_errors
from spec_trainer.cli.log_flags import Json, LogFlags
from spec_trainer.cli.run_flags import RunFlags
from spec_trainer.push.request import PushRequest

_NO_FLAGS = RunFlags()
_LOGS = LogFlags()


def push(
    *overrides: str,
    request: Annotated[PushRequest, Parameter(name="*")],
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Give running servers a draft to serve from now on, without a restart; exit code 1 if they did not take it.

    Parameters
    ----------
    overrides
        Options of a weight transport, push.options.NAME.KEY=VALUE.
    """
    check_overrides(overrides, list(EXAMPLES))
    from spec_trainer.cli.commands.push import push_draft, push_lines

    document = push_draft(request, overrides)
    print_lines(document, push_lines(document), as_json)
    if not document["committed"]:
        raise Leave(1)


def serving(
    *,
    of: Annotated[list[str], Parameter(consume_multiple=1, negative="")],
    history: Path | None = None,
    timeout_s: float = 60.0,
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Show which draft running servers serve: version, digest, acceptance; exit code 1 if they do not serve the same.

    Parameters
    ----------
    of
        Addresses of the servers, such as http://127.0.0.1:8000.
    history
        Run directory of spec-trainer follow, whose verdicts are shown, too: what was served, why, and since when.
    timeout_s
        Longest time, in seconds, until all answers are complete; the servers are queried at the same time.
    """
    from spec_trainer.cli.commands.push import describe_serving, serving_lines, serving_problem
    from spec_trainer.live.verdicts import read_verdicts, verdict_lines

    verdicts = [] if history is None else read_verdicts(history)
    document = describe_serving(of, timeout_s)
    shown = document if history is None else {"servers": document, "history": verdicts}
    print_lines(shown, [*serving_lines(document), *verdict_lines(verdicts)], as_json)
    if problem := serving_problem(document):
        raise Leave(failed(problem, 1))


def follow(
    *overrides: str,
    flags: RunFlags = _NO_FLAGS,
    server: Annotated[list[str] | None, Parameter(consume_multiple=1, negative="")] = None,
    serve: str | None = None,
    draft_model: Path | None = None,
    requests: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Train a draft on live requests of running servers until stopped, and push each better version.

    Parameters
    ----------
    overrides
        Configuration keys, such as follow.replay=0.5.
    server
        Addresses of the servers, such as http://127.0.0.1:8000 (follow.servers).
    serve
        Engine whose server the command starts itself, such as vllm (follow.serve.engine).
    draft_model
        Draft that the servers serve (draft.init_from): what they were started with, or what was pushed to them
        last. By default fresh weights.
    requests
        Live requests after which the command ends (follow.requests).
    """
    check_overrides(overrides, list(EXAMPLES))
    from spec_trainer.cli.commands.follow import resolve_follow, run_follow

    keys = {
        "follow.servers": server,
        "follow.serve.engine": serve,
        "draft.init_from": None if draft_model is None else str(draft_model),
        "follow.requests": requests,
    }
    given = {key: value for key, value in keys.items() if value is not None}
    run = resolve_follow(flags.config, {**flags.as_keys(), **given}, overrides)
    with unforeseen_errors(run.directory.logs):
        print_document(run_follow(run), as_json)
