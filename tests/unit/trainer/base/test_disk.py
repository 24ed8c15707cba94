"""Files and folders that a command writes: whole, and where it may."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spec_core.errors import ArtifactError, RunError
from spec_trainer.base.disk import check_writable, scratch_beside, write_atomically


def test_directory_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "a" / "b")
    for folder in (tmp_path / "file" / "a", tmp_path / "file" / "a" / "b"):
        with pytest.raises(ArtifactError, match=r"file is not a folder that can be written to"):
            check_writable(folder)


def test_a_file_system_of_the_kernel_holds_no_output():
    with pytest.raises(
        ArtifactError, match=r"^output /proc/x: /proc is (not a folder that can|of a file system that)"
    ):
        check_writable(Path("/proc/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_below_a_read_only_one_cannot_be_made(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ArtifactError, match="is not a folder that can be written to"):
        check_writable(tmp_path / "a")


def test_atomic_write_replaces_the_whole_and_leaves_nothing_else(tmp_path, full_disk):
    file = tmp_path / "file"
    write_atomically(file, "a long first version")
    write_atomically(file, "short")
    assert file.read_text() == "short"
    with full_disk(), pytest.raises(RunError, match=f"^{file} was not written: .*File too large"):
        write_atomically(file, "never")
    assert file.read_text() == "short"
    assert list(tmp_path.iterdir()) == [file]


def test_atomic_write_follows_no_link_that_somebody_has_put_in_its_way(tmp_path, monkeypatch):
    """Nobody else knows the names that it writes to; a name that is taken already is not written through."""
    (tmp_path / "precious").write_text("kept")
    for name in (f".file.{os.getpid()}", ".file.0000"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "file", "text")
    assert not (tmp_path / "file").is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda num_bytes: "0000")
    with pytest.raises(RunError, match="File exists"):
        write_atomically(tmp_path / "file", "another")
    assert (tmp_path / "precious").read_text() == "kept"


def test_atomic_write_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


HOLDS = """
import sys, time
from pathlib import Path
from spec_trainer.base.disk import scratch_beside

with scratch_beside(Path(sys.argv[1])) as scratch:
    (scratch / "model.safetensors").write_bytes(b"part")
    print(scratch, flush=True)
    time.sleep(600)
"""


@contextmanager
def held(output: Path) -> Iterator[Path]:
    """Yield the folder of a process that writes beside ``output``; at the end the process is killed."""
    words = [sys.executable, "-c", HOLDS, output]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_scratch_folders_of_killed_commands_are_removed_and_no_others(tmp_path):
    with held(tmp_path / "out") as left:
        pass
    assert left.is_dir()
    others = {tmp_path / name for name in (".out-notes", f".out-{'0' * 17}", f".outer-{'0' * 16}")}
    for folder in others:
        folder.mkdir()
    link = tmp_path / f".out-{'1' * 16}"
    link.symlink_to(tmp_path / ".out-notes")
    with held(tmp_path / "other[1]") as used:
        with scratch_beside(tmp_path / "out") as scratch:
            assert {*tmp_path.iterdir()} == {*others, link, used, scratch}
        with scratch_beside(tmp_path / "other[1]"):
            assert (used / "model.safetensors").is_file(), "its process is alive"
    with scratch_beside(tmp_path / "other[1]"):
        assert not used.exists()
    assert {*tmp_path.iterdir()} == {*others, link}


def test_a_scratch_folder_may_become_the_output(tmp_path):
    with scratch_beside(tmp_path / "out") as scratch:
        (scratch / "file").touch()
        scratch.rename(tmp_path / "out")
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "file"]


def test_a_scratch_folder_is_removed_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), scratch_beside(tmp_path / "out"):
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]
