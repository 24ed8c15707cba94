"""This module defines the command quickstart. It imports no torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from spec_processes import hide_broken_extensions
from spec_trainer.cli.documents import print_document, print_text
from spec_trainer.cli.log_flags import Json, LogFlags
from spec_trainer.cli.target_quickstart.request import TargetQuickstart, parse_budget
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS

Figures = tuple[dict[str, Any], dict[str, Any]]
"""The whole summary, and those of its figures that are printed."""

_LOGS = LogFlags()
_BUDGET = "10m"


def quickstart(
    *,
    target: str | None = None,
    data: str | None = None,
    budget: str | None = None,
    draft: str = DEFAULT_PLUGINS["draft"],
    engine: str | None = None,
    backend: str | None = None,
    output: Path | None = None,
    seed: Annotated[int, Parameter(validator=Number(gte=0, lt=2**63))] = 0,
    as_json: Json = False,
    logs: LogFlags = _LOGS,
) -> None:
    """Train a draft for a target within a time, measure it, and write a report; without --target for a tiny target.

    The tiny target is made on this machine, without downloads. With --target, the same command goes on where it was
    interrupted, and with a larger --budget it trains the draft further.

    Parameters
    ----------
    target
        Folder or hub id of the target.
    data
        Prompts for the target, in any form that training takes; by default the target writes them itself.
    budget
        Time that the whole takes with --target, such as 90s, 10m or 1.5h, over all calls with the same output.
    draft
        Drafting algorithm.
    engine
        Engine that runs the target. By default hf; with --target and an accelerator, the first engine with processes
        of its own that can run the target there, if there is one.
    backend
        Hardware; a backend plugin. By default cpu; with --target, one that has devices of its own here, if there is
        one.
    output
        Folder of all files; by default runs/quickstart, and with --target runs/quickstart-NAME.
    seed
        Seed of the draft's initial weights and data order; other seeds show how far results differ by chance.
    """
    hide_broken_extensions()
    from spec_trainer.plan import combinations
    from spec_trainer.run.serving import closing_lines

    combinations.refuse(combinations.QUICKSTART, SimpleNamespace(target=target, data=data, budget=budget))

    if target is None:
        engine = engine or DEFAULT_PLUGINS["engine"]
        summary, shown = _of_a_tiny_target(draft, engine, backend, output or Path("runs/quickstart"), seed)
    else:
        request = TargetQuickstart(
            target=target,
            data=data,
            budget_s=parse_budget(budget or _BUDGET),
            draft=draft,
            engine=engine,
            backend=backend,
            output=output,
            seed=seed,
        )
        summary, shown = _of_a_target(request)
    print_document(summary if as_json else shown, as_json)
    if not as_json:
        print_text("\n".join(closing_lines(summary)))


def _of_a_tiny_target(draft: str, engine: str, backend: str | None, output: Path, seed: int) -> Figures:
    from spec_trainer.cli.quickstart.run import QuickstartSize, highlights, run_quickstart

    backend = backend or DEFAULT_PLUGINS["backend"]
    summary = run_quickstart(draft, engine, output, QuickstartSize(seed=seed), backend)
    return summary, highlights(summary, output)


def _of_a_target(request: TargetQuickstart) -> Figures:
    from spec_trainer.cli.target_quickstart.outcome import printed_figures
    from spec_trainer.cli.target_quickstart.run import run_target_quickstart

    summary = run_target_quickstart(request)
    return summary, printed_figures(summary)
