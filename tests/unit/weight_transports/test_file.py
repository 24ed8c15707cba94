"""Versions in a folder are whole, few, and can be read back after a crash."""

import fcntl
import os
import time

import pytest
import torch

from spec_core import Manifest
from spec_core.errors import ArtifactError, DeadlineExceeded, PeerLost
from spec_kit.weight_sync.digest import tensor_entry
from spec_testing.reference import reference_backend
from spec_testing.weight_stage import odd_weights, same_bytes
from spec_weight_transports.file import FileConfig, FileTransport, newest

CPU = torch.device("cpu")


def manifest_of(version):
    entries = tuple(tensor_entry(name, tensor) for name, tensor in odd_weights(version).items())
    return Manifest(group="g", version=version, fence=1, target="t", tensors=entries)


def write(transport, version, left_s=10.0):
    with transport.sender(manifest_of(version), odd_weights(version), [""], CPU, "one") as sender:
        (path,) = sender.open(time.monotonic() + left_s)
        return path


@pytest.fixture
def transport(tmp_path):
    return FileTransport(FileConfig(folder=tmp_path / "versions", keep=2), reference_backend())


def names(tmp_path):
    return sorted(path.name.partition("-")[0] for path in (tmp_path / "versions").iterdir())


def test_newest_versions_stay(transport, tmp_path):
    for version in (1, 2, 9, 10):
        write(transport, version)
    assert names(tmp_path) == ["v10", "v9"]


def test_version_that_is_there_is_not_written_again(transport):
    path = write(transport, 1)
    assert write(transport, 1) == path


def test_newest_is_what_was_sent_last(transport, tmp_path):
    for version in (9, 10):
        write(transport, version)
    manifest, weights = newest(tmp_path / "versions")
    assert manifest == manifest_of(10)
    assert all(same_bytes(weights[name], tensor) for name, tensor in odd_weights(10).items())


def test_damaged_version_is_refused(transport, tmp_path):
    with pytest.raises(ArtifactError, match="holds no version"):
        newest(tmp_path)
    path = write(transport, 1)
    file = next((tmp_path / "versions").glob("v1-*")) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="its manifest says"):
        newest(tmp_path / "versions")
    file.write_bytes(content[:-1])
    with (
        transport.receiver(manifest_of(1), CPU, 4096) as receiver,
        pytest.raises(ArtifactError, match="cannot be read"),
    ):
        dict(receiver.receive(path, time.monotonic() + 1))


@pytest.mark.parametrize(("left_s", "close", "error"), [(-1, False, DeadlineExceeded), (9, True, PeerLost)])
def test_unfinished_version_leaves_nothing(transport, tmp_path, left_s, close, error):
    sender = transport.sender(manifest_of(1), odd_weights(1), [""], CPU, "one")
    if close:
        sender.close()
    with pytest.raises(error):
        sender.open(time.monotonic() + left_s)
    assert names(tmp_path) == []


def test_own_folder_goes_with_the_transport(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transport = FileTransport(FileConfig(), reference_backend())
    write(transport, 1)
    assert len(list(tmp_path.iterdir())) == 1
    del transport
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own", [False, True], ids=["in a folder of versions", "in a folder of its own"])
def test_what_killed_publishers_left_is_removed_and_what_others_use_is_not(tmp_path, monkeypatch, own):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prefix = "draft-weights-" if own else ".unfinished-"
    left, used = tmp_path / f"{prefix}left", tmp_path / f"{prefix}used"
    for folder in (left, used):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"a part")
    transport = FileTransport(FileConfig(folder=None if own else tmp_path), reference_backend())
    lock = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(transport, 1)
        assert not left.exists()
        assert used.exists()
    finally:
        os.close(lock)
    write(FileTransport(FileConfig(folder=None if own else tmp_path), reference_backend()), 2)
    assert not used.exists()


def test_folder_in_use_is_not_taken_for_one_that_was_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (FileTransport(FileConfig(), reference_backend()) for _ in range(2))
    path = write(first, 1)
    write(second, 1)
    with first.receiver(manifest_of(1), CPU, 4096) as receiver:
        assert dict(receiver.receive(path, time.monotonic() + 10)).keys() == odd_weights(1).keys()
