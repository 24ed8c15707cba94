"""``spec-trainer regenerate``: generate new answers to the prompts of a data file."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from spec_core import Engine, TargetSpec, foreign_errors
from spec_core.errors import ConfigError, DataError
from spec_core.records import SamplingParams
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import Interrupted, StopRequest
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.base.waiting import Waiting
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.configuration.engine_options import EngineOptions, read_engine_options
from spec_trainer.data.errors import BadRow
from spec_trainer.data.row_files import DataRow
from spec_trainer.data.sources import check_apart, read_rows
from spec_trainer.data.tokens import Encoder
from spec_trainer.measure.regeneration.answer_file import AnswerFile, check_answer_file
from spec_trainer.measure.regeneration.conversation import Conversation, open_conversation
from spec_trainer.measure.regeneration.request import RegenerationRequest
from spec_trainer.measure.regeneration.row_requests import RowInProgress, RowRequests
from spec_trainer.plan.images import prompt_image_rules
from spec_trainer.training.wiring import create_engine
from spec_trainer.workers.passes import cut_at_end_token, warm_up

log = logging.getLogger(__name__)

_WARM_UP_ROWS = 16
"""Number of rows with which an engine warms up."""
_KEPT_TOKENS = 1_000_000
"""Tokens of the first prompts, which are kept from the check: rendering them anew would let a fast engine wait."""


@dataclass(frozen=True, kw_only=True)
class Regeneration:
    """A checked request of ``spec-trainer regenerate``, with its engine options, target and digest of the data."""

    request: RegenerationRequest
    options: EngineOptions
    target: TargetSpec
    encoder: Encoder
    num_rows: int = 0
    """The number of all rows of the part."""
    left_out: frozenset[int] = frozenset()
    """Indices of the rows that cannot be answered."""
    data_digest: str = ""
    """Digest of the rows and their images."""
    rows_digest: str = ""
    """Digest of the rows alone."""
    opened: Mapping[int, Conversation] = field(default_factory=dict)
    """The first conversations, by the index of their row."""

    @property
    def longest(self) -> int:
        """The largest number of tokens that a prompt may have."""
        return self.target.max_positions - self.request.max_new_tokens

    def open(self, content: object) -> Conversation:
        """Return a row's Conversation. Raise BadRow if the row cannot be answered."""
        return open_conversation(
            content, self.encoder, self.target.eos_token_ids, self.longest, self.encoder.images.refused
        )

    def num_left(self, answered: Collection[int]) -> int:
        """Return how many rows can be answered and are not in ``answered``."""
        return self.num_rows - len(self.left_out.union(answered))

    def rows(self, answered: Collection[int]) -> Iterator[RowInProgress]:
        """Read the data again, and yield the rows that can be answered and are not in ``answered``.

        Raise DataError if the data has changed.
        """
        digest = _new_digest()
        for number, source in enumerate(read_rows(self.request.data)):
            digest.update(_bytes_of(source))
            if self.request.has(number) and number not in answered and number not in self.left_out:
                conversation = self.opened.get(number) or self.open(source.content)
                yield RowInProgress(number, source.content, conversation)
        if digest.hexdigest() != self.rows_digest:
            raise DataError(
                f"data {self.request.data!r} has changed while it was answered; begin a new output"
            )

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters for the engine."""
        request = self.request
        return SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            with_margins=False,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that the answers depend on, as a JSON-serializable dict."""
        request = self.request
        sections = self.options.config
        names = ("max_new_tokens", "temperature", "top_p", "seed", "drop_cut", "on_bad_row", "part")
        return {
            "target_digest": self.target.digest,
            "data_digest": self.data_digest,
            **{f"engine.{key}": value for key, value in sections.engine.model_dump(mode="json").items()},
            "engine_versions": dict(self.options.engine_type.probe().versions),
            **{f"backend.{key}": value for key, value in sections.backend.model_dump(mode="json").items()},
            **{name: getattr(request, name) for name in names},
            **{name: value for name, value in sections.data.record().items() if value},
        }


def regenerate_answers(
    request: RegenerationRequest,
    words: Sequence[str] = (),
    limit: TimeLimit | None = None,
    running: Callable[[], Engine] | None = None,
) -> dict[str, Any]:
    """Answer every row of the part, and return the document of ``regenerate --json``.

    ``words``: arguments of the form ``section.key=value``. ``limit``: begins, unless it has begun, when the engine
    has started; the answers that are under way at its end are dropped. ``running``: returns the engine, with the
    options of the request, that the caller has started and closes. The output, whose rows are in the order in which
    they were answered, can be continued.
    """
    work = prepare_regeneration(request, words)
    about = {"target": str(work.target.folder), "data": request.data}
    with AnswerFile(request.output, work.settings, about) as file, StopRequest() as stop:
        if file.rows:
            log.info("%s holds the answers to %d of %d rows", file.path, len(file.rows), work.num_rows)
        figures = {"generated_tokens": 0}
        if not file.complete and work.num_left(file.rows):
            figures = _answer_rest(work, file, stop, limit, running)
        if len(file.rows) < work.num_rows - len(work.left_out):
            counts = {"rows_written": len(file.rows)}
        else:
            counts = file.seal(drop_cut=request.drop_cut)
    return {"output": str(request.output), "rows": work.num_rows, **counts, **figures}


def prepare_regeneration(request: RegenerationRequest, words: Sequence[str]) -> Regeneration:
    """Read and check all inputs of the request; create nothing.

    Raise UsageError, with a message of one line, if an input is wrong.
    """
    from spec_kit.targets.target_reader import read_target
    from spec_trainer.base.hub import resolve_target
    from spec_trainer.data.tokens import Encoder

    check_apart(request.data, request.output)
    options = read_engine_options(request.engine, request.backend, words)
    target = read_target(resolve_target(request.target))
    if request.max_new_tokens >= target.max_positions:
        raise ConfigError(
            f"--max-new-tokens={request.max_new_tokens} leaves no room for a prompt in the {target.max_positions} "
            f"positions of target {target.folder}; lower it"
        )
    images = prompt_image_rules(options.engine_type, target)
    chat = options.config.data
    encoder = Encoder(target.folder, target.vocab_size, chat, images, chat.media_root)
    work = _check_rows(Regeneration(request=request, options=options, target=target, encoder=encoder))
    check_answer_file(request.output, work.settings)
    return work


def _check_rows(work: Regeneration) -> Regeneration:
    """Parse every row of the part once, so that a bad row is found before the engine starts; keep the first ones."""
    num_rows = 0
    num_tokens = 0
    left_out = set[int]()
    kept = dict[int, Conversation]()
    rows = _new_digest()
    images = _new_digest()
    for number, source in enumerate(read_rows(work.request.data)):
        rows.update(_bytes_of(source))
        if not work.request.has(number):
            continue
        num_rows += 1
        try:
            opened = work.open(source.content)
        except BadRow as bad:
            if work.request.on_bad_row == "error":
                raise DataError(f"{source.where}: {bad} (--on-bad-row=skip leaves such rows out)") from bad
            log.warning("left out: %s: %s", source.where, bad)
            left_out.add(number)
        else:
            images.update("".join(image.digest for image in opened.sources).encode())
            num_tokens += len(opened.prompt)
            if num_tokens <= _KEPT_TOKENS and not opened.sources:
                kept[number] = opened
    if len(left_out) == num_rows:
        raise DataError(
            f"part {work.request.part} of data {work.request.data!r} holds no row that can be answered"
        )
    return replace(
        work,
        num_rows=num_rows,
        left_out=frozenset(left_out),
        rows_digest=rows.hexdigest(),
        data_digest=f"{rows.hexdigest()}-{images.hexdigest()}",
        opened=kept,
    )


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _bytes_of(source: DataRow) -> bytes:
    with foreign_errors(DataError, f"{source.where}: the row cannot be written as JSON"):
        return json.dumps(source.content, sort_keys=True, default=str).encode()


def _answer_rest(
    work: Regeneration,
    file: AnswerFile,
    stop: StopRequest,
    limit: TimeLimit | None,
    running: Callable[[], Engine] | None,
) -> dict[str, Any]:
    """Answer all rows that the output file lacks, or those that ``limit`` allows; return figures for the document.

    A row is written when its last turn is answered. So an interruption loses the rows in progress.
    """
    requests = RowRequests(work.rows(file.rows), work.request.seed)
    sampling = work.sampling
    total = num_left = work.num_left(file.rows)
    num_tokens = 0
    end = total if limit is None else None  # with a limit the time left is the limit's
    progress = StepProgress(end, "answering", lambda record: f"{record['tokens_per_s']:,.0f} tok/s", "row")
    with _started_engine(work, file.rows, running) as engine, progress:
        started = time.monotonic()
        if limit is not None:
            limit.begin()
        for request, answer in engine.generate_unordered(requests.next_request, sampling):
            answer = cut_at_end_token(answer, engine, sampling)
            num_tokens += len(answer.token_ids)
            if (row := requests.take(request, answer, sampling.max_new_tokens)) is not None:
                file.append(row.conversation.row(row.number, row.content))
                num_left -= 1
                rate = num_tokens / (time.monotonic() - started)
                progress.show({"step": total - num_left, "tokens_per_s": rate})
            if limit is not None and limit.is_over:
                break
            if stop.requested and num_left:
                raise Interrupted(f"interrupted; rows left: {num_left}; the same command goes on there")
        seconds = time.monotonic() - started
    return {"generated_tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}


@contextmanager
def _started_engine(
    work: Regeneration, answered: Collection[int], running: Callable[[], Engine] | None
) -> Iterator[Engine]:
    """Yield an engine that has decoded a few tokens, because some engines start only with their first prompt."""
    with ExitStack() as stack:
        if running is None:
            stack.enter_context(engine_output_kept(work.options.engine_type))
            engine = stack.enter_context(create_engine(work.options, work.target, reuse_prefixes=True))
        else:
            engine = running()
        with Waiting(f"starting engine {engine.name}"):
            first = itertools.islice(work.rows(answered), _WARM_UP_ROWS)
            warm_up(engine, [row.conversation.prompt for row in first], work.sampling)
        yield engine
