"""RetainedRequests keeps a run's requests in a file, so that a restart does not lose them.

The file is an SQLite database that only its owner can read. Each write is one transaction, so a killed process leaves
the requests of the previous write. Removed requests are overwritten in the file (``secure_delete``).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_core import foreign_errors
from spec_core.errors import ArtifactError, RunError, SpecError
from spec_core.foreign import check_regular
from spec_core.resource import Resource
from spec_kit.live_traffic.live_requests import is_label
from spec_trainer.base.disk import check_own, not_written
from spec_trainer.live.kept_request import KeptRequest, KeptRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from spec_trainer.configuration.follow import RetentionConfig
    from spec_trainer.run.directory import RunDirectory

_SCHEMA = (
    "CREATE TABLE requests (number INTEGER PRIMARY KEY, stored_s REAL NOT NULL, is_held_out INTEGER NOT NULL, "
    "num_prompt INTEGER NOT NULL, label TEXT NOT NULL, input_ids BLOB NOT NULL) STRICT",
    "CREATE TABLE counters (num_seen INTEGER NOT NULL, num_fresh INTEGER NOT NULL) STRICT",
)
_SETTINGS = ("secure_delete = ON", "temp_store = MEMORY", "trusted_schema = OFF", "journal_mode = DELETE")
_LARGEST_FILE = 1 << 36
_WAIT_S = 30.0
"""Longest wait for another process that reads the file, such as a backup."""
_USABLE_LATER = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
}
"""Codes of errors that are no fault of the file's content."""


def open_retained(directory: RunDirectory, config: RetentionConfig) -> RetainedRequests | None:
    """Return the run's retained requests, or None if ``follow.retention`` is off.

    If it is off, the file of an earlier command is removed.
    """
    if config.rows:
        return RetainedRequests(directory.requests, config)
    for file in (directory.requests, directory.requests_journal):
        file.unlink(missing_ok=True)
    return None


class RetainedRequests(Resource):
    """The file of retained requests; only one thread may use it."""

    def __init__(self, file: Path, config: RetentionConfig, clock: Callable[[], float] = time.time) -> None:
        """Open the file, and create it if needed. Raise ArtifactError if it is no file of retained requests."""
        self._file = file
        self._config = config
        self._clock = clock
        check_own(file)
        with self._mapped():
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
            os.chmod(file, 0o600)
            check_regular(file, ArtifactError, _LARGEST_FILE)
            self._database = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)
        try:
            with self._mapped():
                self._prepare()
        except SpecError:
            self.close()
            raise

    def read(self, longest: int, vocab_size: int) -> KeptRequests:
        """Return the requests that are not too old, oldest first. Raise ArtifactError for a damaged file.

        ``longest``: the largest number of tokens of a sample. Requests with more tokens, or with ids outside the
        vocabulary, are left out.
        """
        with self._mapped():
            rows = self._database.execute("SELECT * FROM requests ORDER BY number")
            requests = [(bool(row[2]), _request(row)) for row in rows]
        usable = [
            (is_held_out, one)
            for is_held_out, one in requests
            if not self._is_expired(one.number)
            and len(one.input_ids) <= longest
            and one.input_ids.max() < vocab_size
        ]
        return KeptRequests(
            tuple(one for is_held_out, one in usable if not is_held_out),
            tuple(one for is_held_out, one in usable if is_held_out),
            *self._counters,
        )

    def write(self, kept: KeptRequests) -> None:
        """Replace the file's content by the newest requests of ``kept``, within the configured limits."""
        now_s = self._clock()
        places = {one.number: one for one in (*kept.train, *kept.held_out)}
        self._stored_s = {number: self._stored_s.get(number, now_s) for number in places}
        wanted = self._within_limits(places)
        counters = (kept.num_seen, kept.num_fresh)
        if (wanted, counters) == (self._written, self._counters):
            return
        held_out = {one.number for one in kept.held_out}
        with self._mapped(), self._transaction():
            gone = [(number,) for number in self._written - wanted]
            self._database.executemany("DELETE FROM requests WHERE number = ?", gone)
            new = (self._row(places[number], number in held_out) for number in sorted(wanted - self._written))
            self._database.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", new)
            self._database.execute("UPDATE counters SET num_seen = ?, num_fresh = ?", counters)
        self._written = wanted
        self._counters = counters

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _prepare(self) -> None:
        """Create the tables in an empty file. Raise ArtifactError if the file has other tables."""
        found = self._tables()  # first of all: it rolls an unfinished write of a killed process back
        for setting in _SETTINGS:
            self._database.execute(f"PRAGMA {setting}")
        if not found:
            self._database.execute("PRAGMA auto_vacuum = FULL")
            with self._transaction():
                for statement in _SCHEMA:
                    self._database.execute(statement)
                self._database.execute("INSERT INTO counters VALUES (0, 0)")
            found = self._tables()
        if found != sorted(_SCHEMA):
            raise ArtifactError(f"{self._file} holds no retained requests; move it away, or remove it")
        self._counters = self._read_counters()
        self._stored_s: dict[int, float] = dict(
            self._database.execute("SELECT number, stored_s FROM requests")
        )
        """Request number -> time of its first write, also of requests that are too old to be written."""
        self._written = set(self._stored_s)
        if any(number >= self._counters[0] for number in self._written):
            raise ValueError("it counts fewer requests than it has")

    def _tables(self) -> list[str]:
        return sorted(sql or "" for (sql,) in self._database.execute("SELECT sql FROM sqlite_schema"))

    def _read_counters(self) -> tuple[int, int]:
        ((num_seen, num_fresh),) = self._database.execute("SELECT num_seen, num_fresh FROM counters")
        if not 0 <= num_fresh <= num_seen:
            raise ValueError(f"{num_fresh} new ones of {num_seen} requests")
        return num_seen, num_fresh

    def _within_limits(self, requests: Mapping[int, KeptRequest]) -> set[int]:
        """Return the numbers of the newest requests that the configuration allows on disk."""
        wanted: set[int] = set()
        room = self._config.bytes
        for number in sorted(requests, reverse=True)[: self._config.rows]:
            room -= requests[number].input_ids.nbytes
            if room < 0:
                break
            if not self._is_expired(number):
                wanted.add(number)
        return wanted

    def _is_expired(self, number: int) -> bool:
        # A time in the future comes from a clock that was wrong.
        return abs(self._clock() - self._stored_s[number]) >= self._config.age_s

    def _row(self, one: KeptRequest, is_held_out: bool) -> tuple[Any, ...]:
        stored_s = self._stored_s[one.number]
        return one.number, stored_s, int(is_held_out), one.num_prompt, one.label, one.input_ids.tobytes()

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits, or rolls back after an error
            yield

    @contextmanager
    def _mapped(self) -> Generator[None]:
        """Raise RunError if the disk is full or the file cannot be used now, ArtifactError for any other error."""
        problem = f"{self._file} cannot be used as the file of retained requests"
        with foreign_errors(ArtifactError, f"{problem}; move it away, or remove it"):
            try:
                yield
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & 0xFF  # without the details
                if code == sqlite3.SQLITE_FULL:
                    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    raise not_written(self._file, self._file.parent, full) from error
                if code in _USABLE_LATER:
                    raise RunError(f"{problem} now: {error}; run the same command again later") from error
                raise


def _request(row: tuple[Any, ...]) -> KeptRequest:
    """Return the request of a row of the file. Raise ValueError if the row is damaged."""
    number, _, _, num_prompt, label, content = row
    ids = np.frombuffer(content, dtype=np.int32).copy()  # torch wants arrays that can be written to
    if number < 0 or not 0 < num_prompt < len(ids) or ids.min() < 0 or not is_label(label):
        raise ValueError(f"request {number} is damaged")
    return KeptRequest(number, ids, num_prompt, label)
