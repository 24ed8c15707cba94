"""Files of a checkpoint's state: safetensors that the library reads, digests of what was written, clear errors."""

import pytest
import torch
from safetensors.torch import load_file

from spec_core.errors import ArtifactError, RunError
from spec_kit.sharding import SafetensorsFolder
from spec_kit.sharding.safetensors_folder import new_digest


def test_tensors_are_read_by_safetensors(tmp_path):
    """F1, F3."""
    folder = SafetensorsFolder(tmp_path)
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "one": torch.tensor(2.5),
    }
    folder.write_tensors("a.safetensors", tensors)
    for read in (load_file(tmp_path / "a.safetensors"), folder.read_tensors("a.safetensors")):
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], value) for name, value in tensors.items())


def test_digests_are_those_of_the_files(tmp_path):
    """F2."""
    folder = SafetensorsFolder(tmp_path)
    folder.write_tensors("a.safetensors", {"x": torch.ones(3, 9).T})
    folder.write_json("b.json", {"x": [1]})
    assert folder.digests == {
        name: new_digest((tmp_path / name).read_bytes()).hexdigest() for name in ("a.safetensors", "b.json")
    }
    assert folder.read_json("b.json") == {"x": [1]}


def test_a_dtype_that_no_checkpoint_holds_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"^x is no tensor of a dtype that a checkpoint holds: float64, "):
        SafetensorsFolder(tmp_path).write_tensors("a.safetensors", {"x": torch.tensor(1j)})


@pytest.mark.parametrize("read", ["open_tensors", "read_tensors", "read_json", "read_bytes"])
def test_a_missing_file_may_be_another_strategys(tmp_path, read):
    """F4."""
    with pytest.raises(
        ArtifactError, match=r"a is missing; if another strategy wrote this checkpoint, set strategy.name"
    ):
        getattr(SafetensorsFolder(tmp_path), read)("a")


@pytest.mark.parametrize("read", ["open_tensors", "read_tensors", "read_json"])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, read):
    """F4."""
    (tmp_path / "a").write_bytes(b"\xff" * 40)
    with pytest.raises(ArtifactError) as failed:
        getattr(SafetensorsFolder(tmp_path), read)("a")
    assert str(tmp_path / "a") in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_full_disk_is_an_error(tmp_path):
    """F2: /dev/full takes no byte."""
    (tmp_path / "a").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        SafetensorsFolder(tmp_path).write_tensors("a", {"x": torch.ones(100_000)})
