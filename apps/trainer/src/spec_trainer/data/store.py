"""Write a tokenised dataset to disk, from which every process of a run memory-maps it."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from spec_core.errors import DataError
from spec_core.foreign import read_bytes
from spec_core.records import ImageSource
from spec_trainer.base.disk import not_written
from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport

DATASET = ".dataset-"
"""Prefix of the names of the folders that ``saved_dataset`` writes."""
_IMAGES = "images.json"
_IMAGES_BYTES = 1 << 30
DATASET_FILES = ("lengths.npy", "num_train.npy", "input_ids.npy", "loss_mask.npy", _IMAGES)


@contextmanager
def saved_dataset(dataset: Dataset, root: Path) -> Iterator[Path]:
    """Write the dataset into a new folder below ``root``, and remove it after the ``with`` block.

    Folders that a crash left are removed, too. Raise RunError if the disk is full.
    """
    for left in root.glob(f"{DATASET}*"):
        shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix=DATASET, dir=root))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            write_dataset(dataset, folder)
        except OSError as error:
            raise not_written(f"the tokenised data below {root}", root, error) from error
        yield folder


def write_dataset(dataset: Dataset, folder: Path) -> None:
    """Write ``DATASET_FILES`` into ``folder``."""
    samples = dataset.samples
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    _save(folder / "lengths.npy", lengths)
    _save(folder / "num_train.npy", np.array(len(dataset.train), dtype=np.int64))
    ids = [np.empty(0, dtype=np.int32), *(sample.input_ids for sample in samples)]
    masks = [np.empty(0, dtype=bool), *(sample.loss_mask for sample in samples)]
    _save(folder / "input_ids.npy", np.concatenate(ids))
    _save(folder / "loss_mask.npy", np.concatenate(masks))
    images = {
        sample.sample_id: [
            [image.digest, image.path, base64.b64encode(image.data).decode()] for image in sample.images
        ]
        for sample in samples
        if sample.images
    }
    (folder / _IMAGES).write_text(json.dumps(images))


def save_arrays(folder: Path, name: str, arrays: Sequence[np.ndarray | None]) -> None:
    """Write integer arrays of any lengths into ``folder``, in a form that ``load_arrays`` reads.

    They are stored as int32. An item may also be None.
    """
    lengths = np.array([-1 if array is None else len(array) for array in arrays], dtype=np.int64)
    there = [array for array in arrays if array is not None]
    _save(folder / f"{name}_lengths.npy", lengths)
    _save(folder / f"{name}.npy", np.concatenate([np.empty(0, dtype=np.int32), *there]))


def load_arrays(folder: Path, name: str) -> tuple[np.ndarray | None, ...]:
    """Return what ``save_arrays`` wrote: arrays, and None where it got None."""
    lengths = np.load(folder / f"{name}_lengths.npy")
    values = np.load(folder / f"{name}.npy")
    borders = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])
    parts = (values[start:stop] for start, stop in itertools.pairwise(borders))
    return tuple(None if length < 0 else part for length, part in zip(lengths, parts, strict=True))


def _save(file: Path, array: np.ndarray) -> None:
    """Write an array as ``np.save`` does, but with the system's reason in the error if the disk is full."""
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.reshape(-1).view(np.uint8))


def _read_images(file: Path) -> dict[int, tuple[ImageSource, ...]]:
    """Return sample id -> images, for the samples that have any."""
    stored = json.loads(read_bytes(file, DataError, _IMAGES_BYTES))
    return {
        int(sample_id): tuple(
            ImageSource(digest=digest, path=path, data=base64.b64decode(data))
            for digest, path, data in images
        )
        for sample_id, images in stored.items()
    }


def open_dataset(folder: str | Path) -> Dataset:
    """Return the dataset that ``saved_dataset`` wrote, memory-mapped; its report is empty."""
    folder = Path(folder)
    borders = np.concatenate([[0], np.cumsum(np.load(folder / "lengths.npy"))])
    ids = np.load(folder / "input_ids.npy", mmap_mode="c")
    mask = np.load(folder / "loss_mask.npy", mmap_mode="c")
    images = _read_images(folder / _IMAGES)
    samples = tuple(
        Sample(number, ids[start:stop], mask[start:stop], images=images.get(number, ()))
        for number, (start, stop) in enumerate(itertools.pairwise(borders))
    )
    num_train = int(np.load(folder / "num_train.npy"))
    return Dataset(samples[:num_train], samples[num_train:], DataReport())
