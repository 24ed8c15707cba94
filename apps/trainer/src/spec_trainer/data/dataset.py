"""Read rows into training samples and held-out samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from spec_core.errors import DataError
from spec_core.records import ImageSource
from spec_core.wording import counted
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.errors import BadRow
from spec_trainer.data.report import DataReport
from spec_trainer.data.row_encoder import EncodedRow, RowEncoder, encode_rows
from spec_trainer.data.row_images import NO_IMAGES, ImageRules
from spec_trainer.data.rows import Chat
from spec_trainer.data.sources import check_answers, read_rows
from spec_trainer.data.tokens import Encoded, Encoder

DIVIDED = "conversations that are several samples, because the chat template rewrites earlier turns"
_DEFAULT_EVAL_SAMPLES = 64
_DEFAULT_EVAL_SHARE = 10  # at most one sample in ten
_MOST_HELD_BYTES = 256 << 20
"""Largest number of bytes of images that rows themselves contain, as data: URIs or in Parquet, and that stay in
memory."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A tokenised row, or a part of its turns in the context in which a server had them generated."""

    sample_id: int
    """Index of the sample in ``Dataset.samples``."""
    input_ids: np.ndarray
    """int32 [T]: token ids."""
    loss_mask: np.ndarray
    """bool [T]: whether token i is supervised."""
    where: str = ""
    """Source of the row, as ``file:line``."""
    prompt: np.ndarray | None = None
    """int32 [P]: the prompt that the run's engine answers (``Encoder.prompt``); only in the data of a run
    that decodes."""
    guess_depth: np.ndarray | None = None
    """int32 [T]: for each token, the depth of the draft's guess of it (``Supervision.guess_depth``); only in
    a sample that the run's engine has decoded."""
    images: tuple[ImageSource, ...] = ()
    """Images of the sample, in the order of their tokens."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of a run, by sample id: training samples in file order, then held-out samples."""

    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    report: DataReport
    questions: tuple[np.ndarray | None, ...] = ()
    """Prompt of the conversation's last answer, int32 [P], or None, for each held-out sample.

    Empty if the run does not measure its draft.
    """
    origin: str = ""
    """Digest of all inputs of the data, if ``load_run_data`` loaded it."""

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, indexed by sample id."""
        return self.train + self.held_out

    def sample(self, sample_id: int) -> Sample:
        """Return the sample with this id."""
        return self.samples[sample_id]

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Sample id -> number of tokens of the sample."""
        return {sample.sample_id: len(sample) for sample in self.samples}

    @cached_property
    def total_tokens(self) -> int:
        """The number of tokens of all training samples."""
        return sum(len(sample) for sample in self.train)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Return int64 [V]: how often each token id is supervised in the training samples.

        If no token is supervised, as in prompts without answers, all tokens are counted.
        """
        counts = np.zeros(vocab_size, dtype=np.int64)
        supervised = any(sample.loss_mask.any() for sample in self.train)
        for sample in self.train:
            np.add.at(counts, sample.input_ids[sample.loss_mask] if supervised else sample.input_ids, 1)
        return counts

    @cached_property
    def digest(self) -> str:
        """Digest of token ids, masks, order and split; part of a run's identity."""
        whole = hashlib.blake2b(f"{len(self.train)} {len(self.held_out)}".encode(), digest_size=16)
        for sample in self.samples:
            whole.update(_digest(sample))
        return whole.hexdigest()


def load_dataset(
    config: DataConfig,
    tokenizer_folder: Path,
    vocab_size: int,
    longest_prompt: int | None = None,
    *,
    with_questions: bool = False,
    images: ImageRules = NO_IMAGES,
) -> Dataset:
    """Read, tokenise, check and split the data of a run.

    If ``longest_prompt`` is given, every sample gets a prompt of at most this many tokens, and need not have
    supervised tokens. With ``with_questions``, set ``Dataset.questions``. Without ``data.path`` the dataset
    is empty. Raise DataError, with file and line, for a source or row that cannot be used, and if no sample
    is left.
    """
    if config.path is None:
        return Dataset((), (), DataReport())
    report = DataReport()
    row_encoder = RowEncoder(
        config=config,
        tokenizer_folder=tokenizer_folder,
        vocab_size=vocab_size,
        longest_prompt=longest_prompt,
        with_questions=with_questions,
        images=images,
    )
    reader = _Reader(row_encoder, report)
    train = reader.read(config.path)
    held_out = []
    if config.eval_path is not None:
        held_out = reader.read(config.eval_path)
    elif num := _num_held_out(config, sum(len(row.samples) for row in train)):
        train, held_out = _split(train, num, report, longest_prompt is None)
    parts = [part for row in train + held_out for part in _parts(row)]
    numbered = tuple(replace(part, sample_id=number) for number, part in enumerate(parts))
    num_train = sum(len(row.samples) for row in train)
    questions = _questions(row_encoder.encoder, held_out) if with_questions else ()
    dataset = Dataset(numbered[:num_train], numbered[num_train:], report, questions)
    report.count_kept(dataset.samples, len(dataset.held_out))
    return dataset


def _parts(row: EncodedRow) -> list[Sample]:
    """Return the samples of a row; the sample ids are not set yet."""
    return [
        Sample(0, one.input_ids, one.loss_mask, row.where, row.prompt, images=one.images)
        for one in row.samples
    ]


def _questions(encoder: Encoder, held_out: Sequence[EncodedRow]) -> tuple[np.ndarray | None, ...]:
    """Return ``Dataset.questions``; of the samples of a conversation, all but the last have None."""
    asked: list[np.ndarray | None] = []
    for row in held_out:
        asked += [*[None] * (len(row.samples) - 1), _question(encoder, row.chat)]
    return tuple(asked)


def _question(encoder: Encoder, chat: Chat | None) -> np.ndarray | None:
    """Return the prompt of a conversation's last answer; None if the template rejects it."""
    try:
        return None if chat is None else np.array(encoder.prompt(chat), dtype=np.int32)
    except BadRow:
        return None


class _Reader:
    """Reads the rows of a source into samples; the report counts the cut and the dropped rows."""

    def __init__(self, row_encoder: RowEncoder, report: DataReport) -> None:
        self._config = row_encoder.config
        self._row_encoder = row_encoder
        self._report = report
        self._held_bytes = 0

    def read(self, path: str) -> list[EncodedRow]:
        check_answers(path, self._config)
        found = list(self._usable(path))
        if not found:
            what = f"no usable row ({self._report})" if self._report.dropped else "no row at all"
            raise DataError(f"data {path!r} holds {what}")
        supervised = any(_is_supervised(row) for row in found)
        if not supervised and self._row_encoder.longest_prompt is None:
            raise DataError(
                f"data {path!r} holds no supervised token ({self._report}); "
                "it needs answers, such as assistant turns: spec-trainer regenerate lets the target write them"
            )
        return found

    def _usable(self, path: str) -> Iterator[EncodedRow]:
        with closing(encode_rows(self._row_encoder, read_rows(path))) as rows:
            for where, row in rows:
                if isinstance(row, EncodedRow):
                    if samples := self._kept(where, row.samples):
                        yield replace(row, samples=samples)
                elif self._config.on_bad_row == "error" and not row.harmless:
                    raise DataError(f"{where}: {row} (data.on_bad_row=skip drops such rows)") from row
                else:
                    self._report.drop(row.reason, f"{where}: {row}")

    def _kept(self, where: str, samples: Sequence[Encoded]) -> list[Encoded]:
        """Return the samples of a row, cut to ``data.max_length``, without those that the cut makes useless."""
        if len(samples) > 1:
            self._report.note(DIVIDED, f"{where}: {counted(len(samples), 'sample')}")
        for note in sorted({note for sample in samples for note in sample.notes}):
            self._report.note(note, where)
        kept: list[Encoded] = []
        for sample in samples:
            if sample.after_images > self._config.max_length:
                length = f"{counted(sample.after_images, 'token')} up to the end of the last"
                self._report.drop("data.max_length cuts an image", f"{where}: {length}")
            else:
                self._hold(where, sample)
                kept.append(self._cut(where, sample))
        return [sample for sample in kept if sample.loss_mask.any()] or kept[-1:]

    def _hold(self, where: str, encoded: Encoded) -> None:
        """Raise DataError if the images that rows themselves contain take too much memory."""
        self._held_bytes += sum(len(image.data) for image in encoded.images)
        if self._held_bytes > _MOST_HELD_BYTES:
            raise DataError(
                f"{where}: with this row, the images that rows hold themselves exceed {_MOST_HELD_BYTES} bytes; "
                "save the images as files below data.media_root, and name their paths in the rows"
            )

    def _cut(self, where: str, encoded: Encoded) -> Encoded:
        limit = self._config.max_length
        length = len(encoded.input_ids)
        if length > limit:
            self._report.truncated.add(f"{where}: {counted(length, 'token')}")
            ids, mask = encoded.input_ids[:limit].copy(), encoded.loss_mask[:limit].copy()
            encoded = replace(encoded, input_ids=ids, loss_mask=mask)
        if not encoded.loss_mask.any():
            self._report.unsupervised.add(where)
        return encoded


def _num_held_out(config: DataConfig, num_samples: int) -> int:
    if config.eval_samples is None:
        return min(_DEFAULT_EVAL_SAMPLES, num_samples // _DEFAULT_EVAL_SHARE)
    if config.eval_samples >= num_samples:
        raise DataError(
            f"data.eval_samples={config.eval_samples} leaves nothing of {counted(num_samples, 'sample')} to train on"
        )
    return config.eval_samples


def _split(
    found: Sequence[EncodedRow], num: int, report: DataReport, supervised: bool
) -> tuple[list[EncodedRow], list[EncodedRow]]:
    """Split the rows: hold out whole rows, with the smallest digests, until they have ``num`` distinct samples.

    Duplicates of a held-out sample are dropped, so that the draft is not evaluated on training data. If
    ``supervised``, raise DataError if no training sample has a supervised token.
    """
    held_out, used = _held_out(found, num)
    train: list[EncodedRow] = []
    for index, row in enumerate(found):
        if index in held_out:
            continue
        left = [sample for sample in row.samples if _digest(sample) not in used]
        for _ in range(len(row.samples) - len(left)):
            report.drop("repeats a held-out row", row.where)
        if left:
            train.append(replace(row, samples=left))
    if not any(_is_supervised(row) or not supervised for row in train):
        raise DataError(
            f"holding out {counted(num, 'sample')} leaves nothing to train on; lower data.eval_samples ({report})"
        )
    return train, [held_out[index] for index in sorted(held_out)]


def _held_out(found: Sequence[EncodedRow], num: int) -> tuple[dict[int, EncodedRow], set[bytes]]:
    """Return the held-out rows by index, each with the samples that no other has; and all their digests."""
    digests = [[_digest(sample) for sample in row.samples] for row in found]
    held_out: dict[int, EncodedRow] = {}
    used: set[bytes] = set()
    for index in sorted(range(len(found)), key=lambda index: (digests[index], index)):
        fresh = [
            sample
            for sample, digest in zip(found[index].samples, digests[index], strict=True)
            if digest not in used
        ]
        if len(used) >= num:
            break
        if fresh:
            held_out[index] = replace(found[index], samples=fresh)
        used.update(digests[index])
    return held_out, used


def _is_supervised(row: EncodedRow) -> bool:
    return any(sample.loss_mask.any() for sample in row.samples)


def _digest(content: Encoded | Sample) -> bytes:
    length = len(content.input_ids).to_bytes(8, "little")  # separates ids from mask
    ids = content.input_ids.astype("<i4").tobytes()
    images = "".join(image.digest for image in content.images).encode()
    whole = length + ids + np.packbits(content.loss_mask).tobytes() + images
    return hashlib.blake2b(whole, digest_size=16).digest()
