"""Kills ``spec-trainer push`` at its statements between prepare and the last commit; prints what became of it.

    python -m tests.integration.killed_pushes                  # each state in which a server can find the pusher
    python -m tests.integration.killed_pushes --every          # each statement, the first and the last time
    python -m tests.integration.killed_pushes --statements 6

Two servers (``draft_server.py``) answer without a pause, and a process for each reads the stream of answers. The
statements are those that a whole push was seen to go through: in ``spec_kit.weight_sync``, in what asks servers,
and in the weight transports. Between two acts that another process can see (``ACTS``) a server cannot know where the
pusher has died, so the first statement after each act stands for those up to the next. The push does with one
server after the other what it does with both at once, as threads may come: so there are kills between two commits.

After each kill: what both servers serve, what ``spec-trainer serving`` says, and whether the next push is committed
everywhere. The last lines are the table of ``docs/weight-sync.md``. Exit code 1 where an answer was missing or wrong,
a version had two digests, ``serving`` said what is not so, or the next push failed.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from spec_trainer.cli.commands import push as push_command

from ..random_targets import save_random_target
from . import launching
from .push_statements import Moment
from .push_trial import Row, command, trial


def distinct(moments: list[Moment], *, every: bool) -> list[Moment]:
    """Return the first moment after each act; with ``every`` the first and the last time of each statement."""
    if not every:
        return [next(group) for _, group in groupby(moments, key=lambda moment: moment.acts)]
    last = {moment.statement: moment.time for moment in moments}
    return [moment for moment in moments if moment.time in (1, last[moment.statement])]


def chosen(moments: list[Moment], count: int) -> list[Moment]:
    """Return so many moments from first to last; 0 for all."""
    if not count or count >= len(moments):
        return moments
    return [moments[index * (len(moments) - 1) // max(1, count - 1)] for index in range(count)]


def table(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each kill, with its problems."""
    for row in rows:
        yield f"{row.moment}\n    {row.outcome}"
        yield from (f"    PROBLEM: {problem}" for problem in row.problems)


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield a table of the kills, those in one line that have led to the same."""
    yield "| killed | the two servers serve | `serving` exits with | the next push | kills |"
    yield "|---|---|---|---|---|"
    yield from (
        f"{line} {count} |" for line, count in Counter(row.line for row in rows if row.killed).items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--statements", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="each statement, the first and the last time")
    parser.add_argument(
        "--function", default="", help="statements of the functions whose name holds this alone"
    )
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafts", type=Path, nargs=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, drafts = options.target, options.drafts
        if target is None:
            target, drafts = made_here(folder)
        with trial(target, drafts, folder) as made:
            rows = []
            moments = distinct(made.moments(), every=options.every)
            moments = [moment for moment in moments if options.function in moment.statement[2]]
            print(f"{len(moments)} moments at which a push can be killed")
            for moment in chosen(moments, options.statements):
                rows.append(made.kill_at(moment))
                print("\n".join(table(rows[-1:])), flush=True)
    problems = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} kills, {problems} with a problem", *summary(rows), sep="\n")
    return int(problems > 0)


def made_here(folder: Path) -> tuple[Path, list[Path]]:
    """Return a target and two drafts of one shape with other weights, made by runs of one step."""
    target = save_random_target(folder / "target", "llama", initializer_range=0.6)
    rows = launching.write_rows(folder / "rows.jsonl")
    drafts = []
    for seed in range(2):
        output = folder / f"run-{seed}"
        keys = {"target": target, "output": output, "data.path": rows, "train.steps": 1, "seed": seed}
        code, text = command("train", *(f"{key}={value}" for key, value in keys.items()))
        assert code == 0, text
        drafts.append(output / "draft")
    return target, drafts


if __name__ == "__main__":
    assert push_command  # imported before the forks
    sys.exit(main())
