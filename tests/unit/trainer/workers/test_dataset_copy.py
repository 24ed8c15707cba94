"""The dataset on a host that does not see the run directory."""

from types import SimpleNamespace

import pytest

from spec_core.errors import ConfigError, RunError
from spec_trainer.data.store import saved_dataset
from spec_trainer.workers import dataset_copy
from spec_trainer.workers.dataset_copy import check_sees_run_directory, read_part, run_dataset
from spec_trainer.workers.protocol import DatasetWanted


def order(folder):
    return SimpleNamespace(name="trainer-0", dataset=str(folder), config={"output": "/runs/one"})


def test_a_copy_in_pieces_is_the_dataset_and_leaves_no_file(resolved, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_copy, "_PART_BYTES", 100)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset, asked = resolved().dataset, []
    with saved_dataset(dataset, tmp_path) as folder:

        def ask(wanted):
            asked.append(wanted)
            return read_part(folder, wanted)

        copy = run_dataset(order(tmp_path / "elsewhere"), ask)
        assert [file.name for file in tmp_path.glob("spec-dataset-*")] == []
        assert len(asked) > 8
        assert run_dataset(order(folder), ask).digest == copy.digest == dataset.digest


def test_only_files_of_the_dataset_are_read(tmp_path):
    with pytest.raises(RunError, match=r"\.\./secret, which is no file of the dataset"):
        read_part(tmp_path, DatasetWanted("../secret", 0))


def test_who_needs_the_run_directory_has_to_see_it(tmp_path):
    with pytest.raises(ConfigError, match=r"^trainer-0 needs /runs/one, which its host \S+ does not see"):
        check_sees_run_directory(order(tmp_path / "elsewhere"))
    check_sees_run_directory(order(tmp_path))
