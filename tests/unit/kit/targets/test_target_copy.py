"""A copy of a target has its own regular files, and nothing that lies elsewhere."""

import os
import re

import pytest

from spec_core.errors import TargetError
from spec_kit.targets import copy_target


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights").write_bytes(b"1234")
    return folder


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refusal(target, output):
    with pytest.raises(TargetError) as caught:
        copy_target(target, output)
    (line,) = str(caught.value).splitlines()
    assert not output.exists()
    return line


def test_files_of_every_depth_and_links_within_the_folder_are_copied(target, tmp_path):
    (target / "again").symlink_to("config.json")
    copy_target(target, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(target)
    assert not (tmp_path / "copy" / "again").is_symlink()


def test_snapshot_of_the_hubs_cache_is_copied_with_its_blobs(tmp_path):
    blob, snapshot = tmp_path / "blobs" / "abc", tmp_path / "snapshots" / "main"
    blob.parent.mkdir()
    blob.write_text("{}")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    copy_target(snapshot, tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"config.json": b"{}"}


@pytest.mark.parametrize("to", ["/dev/zero", "../id_rsa", ".."])
def test_link_out_of_the_folder_is_refused(target, tmp_path, to):
    (tmp_path / "id_rsa").write_text("secret")
    (target / "extra").symlink_to(to)
    assert "extra cannot be copied: it is a link out of the target's folder" in refusal(
        target, tmp_path / "copy"
    )


def test_pipe_is_refused(target, tmp_path):
    os.mkfifo(target / "pipe")
    assert "pipe cannot be copied: it is no regular file" in refusal(target, tmp_path / "copy")


@pytest.mark.parametrize("to", ["nowhere", "extra"])
def test_link_to_nothing_is_refused(target, tmp_path, to):
    (target / "extra").symlink_to(to)
    assert "it is a link to nothing" in refusal(target, tmp_path / "copy")


def test_output_inside_the_target_is_refused(target):
    assert "lies in the target's folder" in refusal(target, target / "copy")


def test_a_sparse_file_larger_than_the_disk_is_refused_before_anything_is_copied(target, tmp_path):
    with (target / "vast").open("wb") as stream:
        stream.truncate(1 << 43)
    line = refusal(target, tmp_path / "copy")
    assert re.search(
        rf"takes 8796\d+ bytes \({target}/vast 8796093022208\), and \d+ are free where it is to lie", line
    )
    assert not (tmp_path / "copy").exists()
