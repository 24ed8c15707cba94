"""Cache rendered and tokenised data in the run directory, so that a resumed run starts faster."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from spec_core import foreign_errors
from spec_core.errors import DataError
from spec_core.foreign import cause, check_regular, read_bytes
from spec_trainer.base.disk import new_folder, remove
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import Dataset, load_dataset
from spec_trainer.data.report import DataReport
from spec_trainer.data.row_images import NO_IMAGES, ImageRules
from spec_trainer.data.sources import check_answers, source_files
from spec_trainer.data.store import DATASET_FILES, load_arrays, open_dataset, save_arrays, write_dataset
from spec_trainer.data.tokens import tokenizer_files

log = logging.getLogger(__name__)

FEW_SAMPLES = 2000
"""A dataset of at most this many samples is not cached, because rendering it takes only some seconds."""
_KEPT = ".rendered-"
"""Prefix of the cache folder's name; the rest of the name is ``Dataset.origin``."""
_RECORD = "record.json"
_RECORD_BYTES = 1 << 30
_ARRAYS = ("prompts", "questions")
_FILES = (*DATASET_FILES, *(f"{name}{part}.npy" for name in _ARRAYS for part in ("", "_lengths")))
_UNUSED = {"features", "packing", "shuffle"}
"""Keys of section ``data`` that do not affect the samples."""
_LIBRARIES = ("jinja2", "tokenizers", "transformers")


def load_run_data(
    config: DataConfig,
    tokenizer_folder: Path,
    vocab_size: int,
    longest_prompt: int | None,
    with_questions: bool,
    run_directory: Path,
    images: ImageRules = NO_IMAGES,
) -> Dataset:
    """Return the run's dataset, from the cache in ``run_directory`` if the cache is valid.

    Otherwise ``load_dataset`` reads the data. Nothing is written.
    """
    settings = {
        "data": config.model_dump(mode="json", exclude=_UNUSED),
        "vocab_size": vocab_size,
        "longest_prompt": longest_prompt,
        "with_questions": with_questions,
        "images": asdict(images),
    }
    sources = list(filter(None, (config.path, config.eval_path)))
    if os.path.isdir(run_directory) and any(run_directory.glob(f"{_KEPT}*")):
        origin = _origin(settings, sources, tokenizer_folder)
        folder = run_directory / f"{_KEPT}{origin}"
        kept = _open(folder, origin) if origin else None
        if kept is not None and _in_vocabulary(folder, vocab_size):
            for path in sources:
                check_answers(path, config)
            return kept
    found = load_dataset(
        config, tokenizer_folder, vocab_size, longest_prompt, with_questions=with_questions, images=images
    )
    # The digest reads whole files, so it is computed only after their rows. Images are checked every time.
    few = len(found.samples) <= FEW_SAMPLES or any(sample.images for sample in found.samples)
    return found if few else replace(found, origin=_origin(settings, sources, tokenizer_folder))


def keep_run_data(dataset: Dataset, run_directory: Path) -> None:
    """Cache a large dataset in the run directory, in place of an earlier cache.

    The caller must hold the directory's lock. If the disk is full, log a warning and write no cache.
    """
    folder = run_directory / f"{_KEPT}{dataset.origin}"
    if dataset.origin and _open(folder, dataset.origin) is not None:
        return
    for left in run_directory.glob(f"{_KEPT}*"):
        remove(left)
    if not dataset.origin:
        return
    scratch = new_folder(run_directory, _KEPT)
    try:
        _write(dataset, scratch)
        scratch.rename(folder)
    except OSError as error:
        remove(scratch)
        log.warning("the rendered data is not kept below %s: %s", run_directory, cause(error))


def _origin(settings: Mapping[str, Any], sources: Iterable[str], tokenizer_folder: Path) -> str:
    """Return a digest of all inputs of the samples: settings, library versions and files.

    The digest is empty if a file cannot be read.
    """
    whole = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    whole.update(json.dumps([version(name) for name in _LIBRARIES]).encode())
    own = sorted(Path(__file__).parent.glob("*.py"))
    try:
        for file in chain(own, tokenizer_files(tokenizer_folder), *(source_files(path) for path in sources)):
            whole.update(f"{file}\0{_digest(file)}\0".encode())
    except (OSError, DataError):  # whoever reads the rows says so
        return ""
    return whole.hexdigest()


def _digest(file: Path) -> str:
    check_regular(file, DataError)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _in_vocabulary(folder: Path, vocab_size: int) -> bool:
    """Return whether every cached token id is in the vocabulary.

    The digests of the cached files do not prove this.
    """
    arrays = (np.load(folder / f"{name}.npy") for name in ("input_ids", "prompts", "questions"))
    return all(len(ids) == 0 or 0 <= ids.min() <= ids.max() < vocab_size for ids in arrays)


def _write(dataset: Dataset, folder: Path) -> None:
    write_dataset(dataset, folder)
    save_arrays(folder, "prompts", [sample.prompt for sample in dataset.samples])
    save_arrays(folder, "questions", dataset.questions)
    record = {
        "report": asdict(dataset.report),
        "where": [sample.where for sample in dataset.samples],
        "digests": {name: _digest(folder / name) for name in _FILES},
    }
    text = json.dumps(record)
    (folder / _RECORD).write_text(f"{hashlib.blake2b(text.encode()).hexdigest()}\n{text}")


def _open(folder: Path, origin: str) -> Dataset | None:
    """Return the dataset that ``keep_run_data`` cached; None if it is missing, incomplete or changed."""
    with suppress(DataError), foreign_errors(DataError, f"{folder} is damaged"):
        digest, _, text = read_bytes(folder / _RECORD, DataError, _RECORD_BYTES).decode().partition("\n")
        if hashlib.blake2b(text.encode()).hexdigest() != digest:
            return None
        record = json.loads(text)
        if {name: _digest(folder / name) for name in _FILES} != record["digests"]:
            return None
        dataset = open_dataset(folder)
        prompts = load_arrays(folder, "prompts")
        samples = [
            replace(sample, where=where, prompt=prompt)
            for sample, where, prompt in zip(dataset.samples, record["where"], prompts, strict=True)
        ]
        num_train = len(dataset.train)
        report = pydantic.TypeAdapter(DataReport).validate_python(record["report"])
        questions = load_arrays(folder, "questions")
        return Dataset(tuple(samples[:num_train]), tuple(samples[num_train:]), report, questions, origin)
    return None
