"""``spec-trainer regenerate``: generate new answers to the prompts of a data file."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spec_core.errors import ConfigError, DataError
from spec_core.foreign import foreign_errors
from spec_core.records import SamplingParams
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import Interrupted, StopRequest
from spec_trainer.base.waiting import Waiting
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.configuration.engine_options import read_engine_options
from spec_trainer.data.errors import BadRow
from spec_trainer.measure.regeneration.answer_file import AnswerFile, check_answer_file
from spec_trainer.measure.regeneration.conversation import open_conversation
from spec_trainer.plan.images import prompt_image_rules
from spec_trainer.training.wiring import create_engine
from spec_trainer.workers.passes import answer_prompts, pass_seed, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spec_core import Engine, TargetSpec
    from spec_trainer.configuration.engine_options import EngineOptions
    from spec_trainer.data.tokens import Encoder
    from spec_trainer.measure.regeneration.conversation import Conversation
    from spec_trainer.measure.regeneration.request import RegenerationRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptRow:
    """A row of the data, and its index in the data; the target can answer the row."""

    number: int
    content: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Regeneration:
    """A checked request of ``spec-trainer regenerate``, with its engine options, target and rows."""

    request: RegenerationRequest
    options: EngineOptions
    target: TargetSpec
    encoder: Encoder
    rows: list[PromptRow]
    """The rows that can be answered."""
    num_rows: int
    """The number of all rows of the data, including rows that cannot be answered."""
    data_digest: str

    @property
    def longest(self) -> int:
        """The largest number of tokens that a prompt may have."""
        return self.target.max_positions - self.request.max_new_tokens

    def open(self, content: object) -> Conversation:
        """Return a row's Conversation. Raise BadRow if the row cannot be answered."""
        return open_conversation(
            content, self.encoder, self.target.eos_token_ids, self.longest, self.encoder.images.refused
        )

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters for the engine."""
        request = self.request
        return SamplingParams(
            max_new_tokens=request.max_new_tokens, temperature=request.temperature, top_p=request.top_p
        )

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that the answers depend on, as a JSON-serializable dict."""
        request, sections = self.request, self.options.config
        names = ("max_new_tokens", "temperature", "top_p", "seed", "batch", "drop_cut", "on_bad_row")
        return {
            "target_digest": self.target.digest,
            "data_digest": self.data_digest,
            **{f"engine.{key}": value for key, value in sections.engine.model_dump(mode="json").items()},
            "engine_versions": dict(self.options.engine_type.probe().versions),
            **{f"backend.{key}": value for key, value in sections.backend.model_dump(mode="json").items()},
            **{name: getattr(request, name) for name in names},
            **{name: value for name, value in sections.data.record().items() if value},
        }


def regenerate_answers(request: RegenerationRequest, words: Sequence[str] = ()) -> dict[str, Any]:
    """Answer every row of the data, and return the document of ``regenerate --json``.

    ``words``: arguments of the form ``section.key=value``.
    """
    work = prepare_regeneration(request, words)
    about = {"target": str(work.target.folder), "data": request.data}
    with AnswerFile(request.output, work.settings, about) as file, StopRequest() as stop:
        if file.next_row:
            log.info("%s holds answers up to row %d of %d", file.path, file.next_row, work.num_rows)
        figures = {"generated_tokens": 0} if file.complete else _answer_rest(work, file, stop)
        counts = file.seal()
    return {"output": str(request.output), "rows": work.num_rows, **counts, **figures}


def prepare_regeneration(request: RegenerationRequest, words: Sequence[str]) -> Regeneration:
    """Read and check all inputs of the request; create nothing.

    Raise UsageError, with a message of one line, if an input is wrong.
    """
    from spec_kit.targets.target_reader import read_target
    from spec_trainer.base.hub import resolve_target
    from spec_trainer.data.tokens import Encoder

    options = read_engine_options(request.engine, request.backend, words)
    target = read_target(resolve_target(request.target))
    if request.max_new_tokens >= target.max_positions:
        raise ConfigError(
            f"--max-new-tokens={request.max_new_tokens} leaves no room for a prompt in the {target.max_positions} "
            f"positions of target {target.folder}; lower it"
        )
    images, chat = prompt_image_rules(options.engine_type, target), options.config.data
    encoder = Encoder(target.folder, target.vocab_size, chat, images, chat.media_root)
    empty = Regeneration(
        request=request, options=options, target=target, encoder=encoder, rows=[], num_rows=0, data_digest=""
    )
    work = _read_rows(empty)
    check_answer_file(request.output, work.settings)
    return work


def _read_rows(work: Regeneration) -> Regeneration:
    """Parse every row once, so that a bad row is found before the engine starts."""
    from spec_trainer.data.sources import read_rows

    rows, num_rows, digest = [], 0, hashlib.blake2b(digest_size=16)
    for number, source in enumerate(read_rows(work.request.data)):
        num_rows += 1
        with foreign_errors(DataError, f"{source.where}: the row cannot be written as JSON"):
            digest.update(json.dumps(source.content, sort_keys=True, default=str).encode())
        try:
            opened = work.open(source.content)
        except BadRow as bad:
            if work.request.on_bad_row == "error":
                raise DataError(f"{source.where}: {bad} (--on-bad-row=skip leaves such rows out)") from bad
            log.warning("left out: %s: %s", source.where, bad)
        else:
            digest.update("".join(image.digest for image in opened.sources).encode())
            rows.append(PromptRow(number, source.content))
    if not rows:
        raise DataError(f"data {work.request.data!r} holds no row that can be answered")
    return replace(work, rows=rows, num_rows=num_rows, data_digest=digest.hexdigest())


def _answer_rest(work: Regeneration, file: AnswerFile, stop: StopRequest) -> dict[str, Any]:
    """Answer all rows that the output file lacks, batch by batch; return figures for the document.

    The row number decides to which batch a row belongs, so that an interrupted batch is answered again as a
    whole. This matters because an answer depends on the position of its prompt in the batch.
    """
    batches = _batches(work, file.next_row)
    num_tokens = 0
    progress = StepProgress(len(batches), "answering", lambda record: f"{record['tokens_per_s']:,.0f} tok/s")
    with _started_engine(work) as engine, progress:
        started = time.monotonic()
        for done, (batch, rows) in enumerate(batches.items()):
            if stop.requested:
                raise Interrupted(
                    f"interrupted; batches left: {len(batches) - done}; the same command goes on there"
                )
            answered = answer_batch(engine, rows, work, batch)
            num_tokens += sum(conversation.num_generated for conversation in answered)
            file.append(
                conversation.row(row.number, row.content)
                for row, conversation in zip(rows, answered, strict=True)
                if row.number >= file.next_row and not (work.request.drop_cut and conversation.was_cut)
            )
            progress.show({"step": done + 1, "tokens_per_s": num_tokens / (time.monotonic() - started)})
        seconds = time.monotonic() - started
    return {"generated_tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}


@contextmanager
def _started_engine(work: Regeneration) -> Iterator[Engine]:
    """Yield an engine that has decoded a few tokens, because some engines start only with their first prompt."""
    options = work.options
    with engine_output_kept(options.engine_type), create_engine(options, work.target) as engine:
        with Waiting(f"starting engine {engine.name}"):
            warm_up(engine, [work.open(work.rows[0].content).prompt], work.sampling)
        yield engine


def _batches(work: Regeneration, next_row: int) -> dict[int, list[PromptRow]]:
    """Return batch number -> rows of the batch, from the batch that contains ``next_row`` on."""
    batches: dict[int, list[PromptRow]] = {}
    for row in work.rows:
        batch = row.number // work.request.batch
        if batch >= next_row // work.request.batch:
            batches.setdefault(batch, []).append(row)
    return batches


def answer_batch(
    engine: Engine, rows: Sequence[PromptRow], work: Regeneration, batch: int
) -> list[Conversation]:
    """Answer all turns of ``rows``: the first turn of all rows together, then the second turn, and so on."""
    conversations = [work.open(row.content) for row in rows]
    turn = 0
    while asking := [conversation for conversation in conversations if conversation.prompt]:
        sampling = replace(work.sampling, seed=pass_seed(work.request.seed, batch, turn))
        answers = answer_prompts(engine, [conversation.prompt for conversation in asking], sampling)
        for conversation, answer in zip(asking, answers, strict=True):
            conversation.take(answer.token_ids, sampling.max_new_tokens)
        turn += 1
    return conversations
