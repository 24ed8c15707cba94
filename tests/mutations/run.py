"""Changes the code that a test is there for, one place at a time by Cosmic Ray, and checks that the test fails.

    python -m tests.mutations.run clauses [P6 T4 …]    # a test of each clause of the contracts
    python -m tests.mutations.run ascend               # the Ascend backend, under tests/rigs/fake_cann/with_rig.py
    python -m tests.mutations.run survey FILE TESTS …  # every mutant of a file, and the tests that should notice

Works on a copy of the repository in ``.cache/mutations``. A run that was interrupted goes on where it was, unless
the code has changed. Exit code 1 when no mutant of a row is noticed, 2 when a test fails without one. A survey only
tells of survivors: some change nothing that matters. ``cr-report`` and ``cr-html`` show a session's file.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkItem
from tests.mutations.mutation import ROOT, read_table

FOLDER = ROOT / ".cache" / "mutations"
IGNORED = shutil.ignore_patterns(".git", ".cache", ".venv*", "__pycache__", "dist", "runs", "site")
LIMIT_S = 300
"""Seconds for the tests of one mutant. A hang is noticed earlier, by pytest's own limit of 90 s for each test."""
SKIPPED = ("core/ReplaceBinaryOperator", "core/NumberReplacer")
"""Operators whose mutants a survey leaves out: a dozen for each ``|`` of an annotation, two for each timeout."""


def pytest(tests: list[str]) -> str:
    """Return the command that runs tests."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=90"]
    return shlex.join([sys.executable, "-m", "pytest", *options, *tests])


def enter_copy(name: str) -> None:
    """Copy the repository, enter the copy, and have Python find the packages there."""
    tree = FOLDER / name
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=IGNORED)
    os.chdir(tree)
    sources = sorted(str(folder) for folder in tree.glob("*/*/src"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sources]))


def session(name: str, items: list[WorkItem]) -> Path:
    """Return the file of a session: the one that was interrupted, or one with nothing done yet."""
    changed = hashlib.sha256(repr(items).encode())
    for file in sorted({*Path("packages").rglob("*.py"), *Path("tests").rglob("*.py")}):
        changed.update(file.read_bytes())
    path = FOLDER / f"{name}-{changed.hexdigest()[:12]}.sqlite"
    if not path.exists():
        for earlier in FOLDER.glob(f"{name}-*.sqlite"):
            earlier.unlink()
        with use_db(path) as db:
            db.add_work_items(items)
    return path


def fails_without(tests: set[str]) -> bool:
    """Run tests of code that is not changed; print what fails."""
    run = subprocess.run(shlex.split(pytest(sorted(tests))), capture_output=True, text=True, check=False)
    if run.returncode:
        print(f"without a mutation, too, a test fails:\n{run.stdout[-4000:]}")
    return run.returncode != 0


def run_table(table: str, chosen: list[str]) -> int:
    """Test the mutants of each row of a table by the one test that it names, until the test fails."""
    known = read_table(table)
    proved = sorted({row.proves for row in known})
    if unknown := set(chosen) - set(proved):
        print(f"no mutation of {', '.join(sorted(unknown))}; there are some of {', '.join(proved)}")
        return 2
    rows = [row for row in known if row.proves in (chosen or proved)]
    enter_copy(table)
    items = [
        WorkItem.single(f"{number:03}.{index:02}", mutant)
        for number, row in enumerate(rows)
        for index, mutant in enumerate(row.mutants())
    ]
    with use_db(session(table, items), WorkDB.Mode.open) as db:
        if not db.num_results and fails_without({row.test for row in rows}):
            return 2
        caught = {job.partition(".")[0] for job, result in db.results if result.is_killed}
        for item in sorted(db.pending_work_items, key=lambda item: item.job_id):
            number = item.job_id.partition(".")[0]
            if number not in caught:
                result = mutate_and_test(item.mutations, pytest([rows[int(number)].test]), LIMIT_S)
                db.set_result(item.job_id, result)
                caught |= {number} if result.is_killed else set()
        for number, row in enumerate(rows):
            told = "caught  " if f"{number:03}" in caught else "SURVIVED"
            print(told, f"{row.proves:18} {row.function}: {row.word}  {row.test.split('::')[-1]}")
        return 0 if len(caught) == len(rows) else 1


def run_survey(file: str, tests: list[str]) -> int:
    """Test the mutants of a file, but for those of SKIPPED, by given tests."""
    name = Path(file).stem
    enter_copy(name)
    with use_db(FOLDER / f"{name}.all") as db:
        init([Path(file)], db, {})
        items = [item for item in db.work_items if not item.mutations[0].operator_name.startswith(SKIPPED)]
    path = session(name, [WorkItem.single(f"{n:04}", item.mutations[0]) for n, item in enumerate(items)])
    with use_db(path, WorkDB.Mode.open) as db:
        if not db.num_results and fails_without(set(tests)):
            return 2
        for item in sorted(db.pending_work_items, key=lambda item: item.job_id):
            result = mutate_and_test(item.mutations, pytest(tests), LIMIT_S)
            db.set_result(item.job_id, result)
            (one,) = item.mutations
            told = "caught  " if result.is_killed else "SURVIVED"
            print(
                told,
                f"{one.module_path}:{one.start_pos[0]} {one.definition_name}: {one.operator_name}",
                flush=True,
            )
        caught = sum(result.is_killed for _, result in db.results)
        print(f"{caught} of {db.num_work_items} mutations caught; cr-report {path}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for table in ("clauses", "ascend"):
        kinds.add_parser(table).add_argument("chosen", nargs="*")
    survey = kinds.add_parser("survey")
    survey.add_argument("file")
    survey.add_argument("tests", nargs="+")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.kind == "survey":
        return run_survey(given.file, given.tests)
    return run_table(given.kind, given.chosen)


if __name__ == "__main__":
    sys.exit(main())
