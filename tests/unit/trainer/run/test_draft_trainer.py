"""Exported folders appear whole or not at all."""

import os
from dataclasses import replace

import pytest

from spec_core.errors import ArtifactError, RunError
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.targets.target_reader import read_target_tensors
from spec_trainer.run.draft_trainer import export_draft


def weights(target):
    return Eagle3Draft(Eagle3Config()).build(target, read_target_tensors(target), None).state_dict()


def test_export_replaces_the_folder(target, tmp_path):
    folder = tmp_path / "drafts" / "draft"
    folder.mkdir(parents=True)
    (folder / "stale").touch()
    export_draft(Eagle3Draft(Eagle3Config()), weights(target), target, folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)]
)
def test_export_follows_the_umask(target, tmp_path, umask, folder_mode, file_mode):
    folder = tmp_path / "draft"
    before = os.umask(umask)
    try:
        export_draft(Eagle3Draft(Eagle3Config()), weights(target), target, folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == folder_mode
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {file_mode}


def test_export_to_a_full_disk_leaves_the_earlier_one(target, tmp_path, full_disk):
    folder = tmp_path / "draft"
    export_draft(Eagle3Draft(Eagle3Config()), weights(target), target, folder)
    before = (folder / "model.safetensors").read_bytes()
    state = weights(target)
    with full_disk(), pytest.raises(RunError, match=f"^draft {folder} was not written: .*File too large"):
        export_draft(Eagle3Draft(Eagle3Config()), state, target, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_weights_that_are_not_finite_as_they_are_served_are_not_exported(target, tmp_path, value):
    state = weights(target)
    served = replace(target, dtype="float16")  # to which 3e38 is infinite
    state["fc.weight"][0, 0] = value
    with pytest.raises(ArtifactError, match=r"fc\.weight holds values that are not finite"):
        export_draft(Eagle3Draft(Eagle3Config()), state, served, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []
