"""Build the table of ``spec-trainer plugins``: every installed plugin, and whether it runs here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress

from spec_core import plugins
from spec_core.errors import PluginError
from spec_trainer.cli.commands.plugin_sources import gone_import
from spec_trainer.cli.documents import document_stream, keep_stdout_for_documents

_COMMAND = "spec-trainer"
"""The distribution whose requirements and extras include every plugin of this repository."""
_IMPORT_S = 120.0
"""Seconds to wait for the import of a plugin's module; on a busy host a large one takes a minute."""
_PROBE_S = 20
"""Seconds to wait for the plugin's probe after the import."""
_PIPED_COLUMNS = 1000
"""Width of the table in a file or pipe, so that every row is one line."""

TableRow = dict[str, str | int | None]


def plugin_rows() -> list[TableRow]:
    """Return one row of the plugin table for each installed entry point.

    The probe of a third-party plugin runs in a child process with a timeout, because it may hang or crash. After the
    timeout the plugin's status is ``unknown``. An entry point with a misspelt group has a row, too, so that the
    mistake is visible.
    """
    rows: list[TableRow] = []
    ours = plugins.required_by(_COMMAND)
    for record in plugins.listed():
        probe = plugins.status if record.distribution in ours else _probe_apart
        rows.append(_row(record, *probe(record)))
    rows += [
        _row(record, "broken", plugins.unknown_group_problem(record.kind), None)
        for record in plugins.unknown_groups()
    ]
    return rows


def _row(record: plugins.PluginRecord, status: str, reason: str, api: int | None) -> TableRow:
    return {
        "kind": record.kind,
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "api": api,
        "status": status,
        "reason": reason,
    }


def print_table(rows: list[TableRow]) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in rows[0]:
        table.add_column(column, overflow="fold", no_wrap=column != "reason")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    stream = document_stream()
    Console(file=stream, width=None if stream.isatty() else _PIPED_COLUMNS).print(table)


def _probe_apart(record: plugins.PluginRecord) -> tuple[str, str, int | None]:
    words = [record.kind, record.name, str(_PROBE_S)]
    command = [sys.executable, "-P", "-m", "spec_trainer.cli.commands.plugins", *words]
    limit_s = _IMPORT_S + _PROBE_S
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return "unknown", f"its import took longer than {_IMPORT_S:.0f} s on this host", None
    if child.returncode == -signal.SIGALRM:
        return "unknown", f"its probe took longer than {_PROBE_S} s on this host", None
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return "broken", f"its probe ended with exit code {child.returncode}: {last}", None
    status, reason, api = json.loads(child.stdout)
    return status, reason, api


def main(kind: str, name: str, probe_s: str) -> None:
    """Print the status of one plugin; this function runs in a child process.

    A plugin whose sources import what the libraries lack is broken, although it loads. An alarm signal kills the
    process if the plugin's probe takes more than ``probe_s`` seconds after the import.
    """
    record = next(record for record in plugins.listed() if (record.kind, record.name) == (kind, name))
    with suppress(PluginError):  # ``status`` below reports the error
        plugins.load_listed(record)
    gone = gone_import(record.entry_point.module.partition(".")[0])
    signal.alarm(int(probe_s))
    found = plugins.status(record)
    if gone and found[0] != "broken":
        found = "broken", f"{record.what}: {gone}", None
    print(json.dumps(found), file=document_stream(), flush=True)


if __name__ == "__main__":
    keep_stdout_for_documents()
    main(*sys.argv[1:])
