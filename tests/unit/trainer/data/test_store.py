import shutil
from contextlib import ExitStack

import numpy as np
import pytest

from spec_core.errors import RunError
from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.data.store import open_dataset, saved_dataset


def dataset() -> Dataset:
    rows = [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 0]), ([1, 2, 3, 4], [1, 0, 1, 1])]
    samples = tuple(
        Sample(number, np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
        for number, (ids, mask) in enumerate(rows)
    )
    return Dataset(samples[:2], samples[2:], DataReport())


def test_what_is_opened_is_what_was_saved_and_nothing_stays(tmp_path) -> None:
    mine = dataset()
    with saved_dataset(mine, tmp_path) as folder:
        found = open_dataset(str(folder))
        assert found.digest == mine.digest
        assert (len(found.train), len(found.held_out)) == (2, 1)
        assert found.lengths == mine.lengths
    assert list(tmp_path.iterdir()) == []


def test_what_a_crash_left_is_removed(tmp_path) -> None:
    (tmp_path / ".dataset-x").mkdir()
    (tmp_path / ".dataset-x" / "input_ids.npy").write_text("half")
    with saved_dataset(dataset(), tmp_path) as folder:
        assert open_dataset(folder).digest == dataset().digest
        assert list(tmp_path.iterdir()) == [folder]


def test_a_run_whose_directory_was_replaced_leaves_the_other_s_alone(tmp_path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with ExitStack() as other:
        with saved_dataset(dataset(), root):
            shutil.rmtree(root)
            root.mkdir()
            folder = other.enter_context(saved_dataset(dataset(), root))
        assert open_dataset(folder).digest == dataset().digest


def test_without_room_the_run_fails_with_the_reason(tmp_path) -> None:
    with (
        pytest.raises(RunError, match=r"the tokenised data below .*gone was not written: No such file"),
        saved_dataset(dataset(), tmp_path / "gone"),
    ):
        pass


def test_a_full_disk_is_told_in_the_system_s_words(tmp_path, full_disk) -> None:
    with (
        full_disk(),
        pytest.raises(RunError, match=r"was not written: File too large \(\d+ MB are free in .*; raise"),
        saved_dataset(dataset(), tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
