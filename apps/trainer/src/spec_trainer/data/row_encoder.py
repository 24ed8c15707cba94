"""Encode rows as tokens, in this process or, if there are many rows, in one process per CPU core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from spec_core.errors import DataError, RunError
from spec_processes import collect_rarely, die_with_parent
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.errors import BadRow
from spec_trainer.data.row_files import DataRow
from spec_trainer.data.row_images import NO_IMAGES, ImageRules
from spec_trainer.data.rows import Chat, Text, Tokens, parse_row
from spec_trainer.data.tokens import Encoded, Encoder

ALONE_S = 5.0
"""CPU seconds spent on rows before other processes are started; starting a process takes about as long."""
_MOST_PROCESSES = 16
"""Largest number of processes; each takes 0.4 GB of memory."""
_CHUNK_ROWS = 32
_CHUNKS_AHEAD = 4
"""Chunks of rows that are read ahead for each process."""


@dataclass(frozen=True)
class EncodedRow:
    """The tokens of one row, before the cut to ``data.max_length``."""

    where: str
    """Source of the row, as ``file:line``."""
    samples: list[Encoded]
    """The row's samples (``Encoder.encode``), at least one."""
    prompt: np.ndarray | None
    """int32 [P]: prompt for the engine, if ``RowEncoder.longest_prompt`` is set; else None."""
    chat: Chat | None
    """The row's conversation, if ``RowEncoder.with_questions``; else None."""


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Encodes single rows: parse, render, tokenise. It is picklable, for other processes."""

    config: DataConfig
    tokenizer_folder: Path
    vocab_size: int
    longest_prompt: int | None
    """Largest number of tokens of a prompt; None if rows get no prompts."""
    with_questions: bool
    images: ImageRules = NO_IMAGES

    @cached_property
    def encoder(self) -> Encoder:
        """The Encoder, created on first use in each process."""
        return Encoder(
            self.tokenizer_folder,
            self.vocab_size,
            self.config,
            self.images,
            self.config.media_root,
        )

    def encode(self, row: DataRow) -> EncodedRow | BadRow:
        """Return the row's tokens, or a BadRow if the row cannot be used.

        Raise DataError for a problem of all rows, such as a missing tokenizer.
        """
        try:
            content = parse_row(row.content, self.images.refused)
            samples = self.encoder.encode(content, self.config.last_turn_only)
            if len(samples[-1].input_ids) < 2:
                raise BadRow("fewer than 2 tokens", harmless=True)
            prompt = self._prompt(content)
        except BadRow as bad:
            return bad
        chat = content if self.with_questions and isinstance(content, Chat) else None
        # The engine of a run with prompts answers the last turn anew; the other samples would repeat the prompt.
        return EncodedRow(row.where, samples if prompt is None else samples[-1:], prompt, chat)

    def _prompt(self, row: Chat | Text | Tokens) -> np.ndarray | None:
        longest = self.longest_prompt
        if longest is None:
            return None
        prompt = self.encoder.prompt(row)
        if isinstance(row, Text):
            prompt = prompt[:longest]
        elif len(prompt) > longest:
            raise BadRow("prompt too long", f"{len(prompt)} tokens, {longest} are possible", harmless=True)
        return np.array(prompt, dtype=np.int32)


def encode_rows(
    row_encoder: RowEncoder, rows: Iterator[DataRow]
) -> Generator[tuple[str, EncodedRow | BadRow], None, None]:
    """Yield the source (``file:line``) and the result of every row, in the order of the rows.

    The order is the same for any number of processes. Raise DataError, after the results of all earlier rows,
    if rows cannot be encoded or read further.
    """
    num_processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    until = time.thread_time() + ALONE_S
    for row in rows:
        yield row.where, row_encoder.encode(row)
        if num_processes > 1 and time.thread_time() > until:
            yield from _by_processes(num_processes, row_encoder, rows)


def _by_processes(
    num_processes: int, row_encoder: RowEncoder, rows: Iterator[DataRow]
) -> Iterator[tuple[str, EncodedRow | BadRow]]:
    # Each loads the tokenizer for itself, not from this process: a fork would copy locks that threads here hold.
    pool = ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), _begin, (replace(row_encoder),)
    )
    try:
        yield from _in_order(pool, rows, _CHUNKS_AHEAD * num_processes)
    except BrokenProcessPool as error:
        raise RunError(
            f"one of {num_processes} processes that render the data was killed; see whether memory was short, then "
            "run the same command again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, rows: Iterator[DataRow], most: int
) -> Iterator[tuple[str, EncodedRow | BadRow]]:
    unread: list[DataError] = []
    readable = _until_error(rows, unread)
    running: deque = deque()
    while chunk := list(islice(readable, _CHUNK_ROWS)):
        running.append(pool.submit(_encode_chunk, chunk))
        if len(running) == most:
            yield from running.popleft().result()
    while running:
        yield from running.popleft().result()
    if unread:
        raise unread[0]


def _until_error(rows: Iterable[DataRow], unread: list[DataError]) -> Iterator[DataRow]:
    """Yield the rows; if reading fails, append the error to ``unread`` and stop."""
    try:
        yield from rows
    except DataError as error:
        unread.append(error)


_mine: list[RowEncoder] = []
"""The row encoder of this process, if ``_by_processes`` has started it."""


def _begin(row_encoder: RowEncoder) -> None:
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died before the line above
        os._exit(1)
    collect_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    _mine.append(row_encoder)


def _encode_chunk(rows: list[DataRow]) -> list[tuple[str, EncodedRow | BadRow]]:
    return [(row.where, _mine[0].encode(row)) for row in rows]
