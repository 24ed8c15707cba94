"""This module defines the command line: one function for each command. It imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from spec_core.errors import ConfigError
from spec_processes import (
    collect_rarely,
    leave_out_working_directory,
    let_waiting_threads_sleep,
    restart_where_torch_would_fail,
)
from spec_trainer.base.colour import takes_colours
from spec_trainer.base.console_log import log_to_stderr, show_from
from spec_trainer.base.named_file import check_named_page, write_named_file
from spec_trainer.base.words import check_command_line, check_overrides, convert_flag
from spec_trainer.cli.documents import (
    document_stream,
    keep_stdout_for_documents,
    print_document,
    print_lines,
    print_marked,
    print_text,
    stdout_for_documents,
)
from spec_trainer.cli.draft_commands import convert, export_command
from spec_trainer.cli.examples import EXAMPLES, examples_text
from spec_trainer.cli.exit_codes import exit_code_of
from spec_trainer.cli.last_resort import Leave, unforeseen_errors
from spec_trainer.cli.leak_reports import drop_leak_reports
from spec_trainer.cli.log_flags import Json, LogFlags
from spec_trainer.cli.quickstart_command import quickstart
from spec_trainer.cli.run_flags import RunFlags
from spec_trainer.cli.server_commands import follow, push, serving
from spec_trainer.cli.surroundings import (
    check_address_space,
    check_working_directory,
    open_closed_streams,
    prepare_help,
)
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.measure.regeneration.request import RegenerationRequest

app = App(
    name="spec-trainer",
    help="Train drafts for speculative decoding on the hidden states of a live target. "
    "Hardware, drafts, engines, strategies and launchers are plugins: `spec-trainer plugins` lists them.",
    version=lambda: metadata.version("spec-trainer"),
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(converter=convert_flag),
)

_NO_FLAGS = RunFlags()
_LOGS = LogFlags()


def train_command(*overrides: str, flags: RunFlags = _NO_FLAGS, logs: LogFlags = _LOGS) -> None:
    """Train a draft (the default command). The same command again resumes the run.

    Parameters
    ----------
    overrides
        Configuration keys, such as train.lr=1e-4.
    """
    run = _resolve(overrides, flags)
    from spec_trainer.cli.commands.train import run_training
    from spec_trainer.run.serving import closing_lines

    with unforeseen_errors(run.directory.logs):
        summary = run_training(run)
    print_text(
        "\n".join((f"draft: {summary['draft']}", f"report: {run.directory.report}", *closing_lines(summary)))
    )


app.default(train_command)
app.command(train_command, name="train")


@app.command
def plan(
    *overrides: str,
    flags: RunFlags = _NO_FLAGS,
    show: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    serve_elsewhere: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Check a run's configuration, and print which processes would start where; start nothing.

    Parameters
    ----------
    overrides
        Configuration keys, such as train.lr=1e-4.
    show
        Number of samples to print as the draft gets them; tokens that it learns are green, or between [[ and
        ]] without colours.
    serve_elsewhere
        Only warn if no engine that is installed here serves the draft, instead of refusing it. If none of the
        engines that serve such drafts is installed here, the draft is refused only if no installed plugin names
        a version that would serve it.
    """
    from spec_trainer.cli.commands.plan import describe_run, with_sizes
    from spec_trainer.push.servers import check_listening, check_pushes
    from spec_trainer.run.serving import check_serving

    run = _resolve(overrides, flags)
    if not serve_elsewhere:
        check_serving(run.target, run.draft)
    check_pushes(run)
    check_listening(run)
    document = describe_run(run) if as_json else with_sizes(describe_run(run))
    if not show:
        return print_document(document, as_json)
    from spec_trainer.cli.commands.sample_text import sample_lines, sample_texts
    from spec_trainer.data.tokens import Encoder

    encoder = Encoder(run.target.folder, run.target.vocab_size, run.config.data)
    texts = sample_texts(run.source.train[:show], encoder)
    print_document({**document, "shown": texts} if as_json else document, as_json)
    if not as_json:
        print_marked(sample_lines(texts, takes_colours(document_stream())))
    return None


@app.command
def plugins(*, as_json: Json = False, logs: LogFlags = _LOGS) -> None:
    """List installed plugins: kind, name, distribution, version, api, status, reason."""
    from spec_trainer.cli.commands.plugins import plugin_rows, print_table

    rows = plugin_rows()
    print_text(json.dumps(rows, indent=2)) if as_json else print_table(rows)


@app.command(name="check")
def check_command(
    *, backend: str | None = None, thorough: bool = False, as_json: Json = False, logs: LogFlags = _LOGS
) -> None:
    """Describe this machine, or test a backend on it; the report is made to be pasted into an issue.

    Parameters
    ----------
    backend
        Name of the backend to test. If it is not given, the command tests the first backend that has its own
        devices here, or else cpu. The report then also lists the plugins that can run here, the installed and
        missing packages, and the largest target that fits on each backend's devices.
    thorough
        Also train every installed draft for some steps and compare the losses with cpu's. Each step runs in a
        process of its own, for at most five minutes.
    """
    from spec_trainer.cli.commands.check import check_backend
    from spec_trainer.cli.commands.machine_report import describe_machine

    machine = describe_machine() if backend is None else {"fits": {}}
    devices = [name for name, offer in machine["fits"].items() if offer["device_bytes"] is not None]
    report = check_backend(next(iter(devices), "cpu") if backend is None else backend, thorough)
    if backend is None:
        report = {**machine, **report}
    print_document(report, as_json)
    if not report["ok"]:
        raise Leave(1)


@app.command(name="--print-completion")
def print_completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script: ``source <(spec-trainer --print-completion bash)``."""
    from spec_trainer.cli.commands.completion import completion_script

    print(completion_script(app, shell), file=document_stream(), flush=True)


@app.command
def capture(
    *overrides: str,
    flags: RunFlags = _NO_FLAGS,
    verify: Path | None = None,
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Run the target over all data once and keep the features; data.features=FOLDER trains from them.

    Such a run starts no engine. The same command again goes on where it stopped.

    Parameters
    ----------
    overrides
        Configuration keys, such as capture.shard_bytes=268435456.
    verify
        Check every checksum of this folder of features, and do nothing else.
    """
    if verify is not None:
        from spec_trainer.offline.verify import verify_features

        return print_document(verify_features(verify), as_json)
    _check_words(overrides)
    if flags.output is None and not any(word.startswith("output=") for word in overrides):
        raise ConfigError("capture needs --output: the folder to write features to")
    from spec_trainer.cli.commands.capture import resolve_capture, run_capture

    return print_document(run_capture(resolve_capture(flags.config, flags.as_keys(), overrides)), as_json)


@app.command
def regenerate(
    *overrides: str,
    request: Annotated[RegenerationRequest, Parameter(name="*")],
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Let the target generate new answers to prompts, as training data; the same command again resumes.

    Parameters
    ----------
    overrides
        Options of engine and backend, such as engine.dtype=float32, and data.chat_template_kwargs.NAME=VALUE.
    """
    _check_words(overrides)
    from spec_trainer.cli.commands.regenerate import regenerate_answers

    print_document(regenerate_answers(request, overrides), as_json)


app.command(export_command, name="export")
app.command(convert)


@app.command
def evaluate(
    *overrides: str,
    request: Annotated[EvaluationRequest | None, Parameter(name="*")] = None,
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Measure acceptance length and speed of an exported draft, or of a running server, on prompts.

    Parameters
    ----------
    overrides
        Options of engine and backend, such as engine.dtype=float32, and data.chat_template_kwargs.NAME=VALUE.
    """
    request = request or EvaluationRequest()  # its checks say what is missing
    if request.report is not None:
        check_named_page(request.report, "--report")
    if request.breakdown:
        from spec_trainer.cli.commands.breakdown import break_down_draft
        from spec_trainer.measure.evaluation.breakdown import breakdown_lines

        document = break_down_draft(request, overrides)
        print_lines(document, breakdown_lines(document), as_json)
        return
    if request.server:
        from spec_trainer.cli.commands.evaluate_server import evaluate_servers
        from spec_trainer.measure.server.server_page import server_page as evaluated_page
        from spec_trainer.measure.server.tables import server_lines as lines

        document = evaluate_servers(request, overrides)
    else:
        from spec_trainer.cli.commands.evaluate import evaluate_draft
        from spec_trainer.measure.evaluation.evaluation_page import evaluation_page as evaluated_page
        from spec_trainer.measure.evaluation.tables import evaluation_lines as lines

        document = evaluate_draft(request, overrides)
    print_lines(document, lines(document), as_json)
    if request.report is not None:  # last, so that a full disk does not cost the figures
        write_named_file(request.report, evaluated_page(document))


app.command(quickstart)
app.command(push)
app.command(serving)
app.command(follow)
for _name in EXAMPLES:
    app[_name].help_epilogue = examples_text(_name)
app.help_epilogue = examples_text("train")


def main() -> None:
    """Run the command line of this process and exit."""
    open_closed_streams()
    drop_leak_reports()
    leave_out_working_directory()
    let_waiting_threads_sleep()
    restart_where_torch_would_fail()
    collect_rarely()
    keep_stdout_for_documents()
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run the command line with the arguments ``words``; return its exit code."""
    log_to_stderr()
    return exit_code_of(lambda: _call(words))


def _call(words: Sequence[str]) -> None:
    check_command_line(words)
    check_working_directory()
    if not {"--help", "-h"}.isdisjoint(words):
        prepare_help(app)
    command, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    show_from(bound.arguments.get("logs", _LOGS).level)
    # Help and version are cyclopts' own; they print at once.
    own = command.__module__.startswith(__package__)
    if own:
        check_address_space()
    with stdout_for_documents() if own else redirect_stdout(document_stream()):
        command(*bound.args, **bound.kwargs)


def _resolve(overrides: Sequence[str], flags: RunFlags) -> Any:
    _check_words(overrides)
    from spec_trainer.plan.resolve import resolve

    return resolve(flags.config, flags.as_keys(), overrides)


def _check_words(overrides: Sequence[str]) -> None:
    check_overrides(overrides, list(EXAMPLES))
