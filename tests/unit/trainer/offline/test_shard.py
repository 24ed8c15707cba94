"""One file of features: bit for bit what was captured, or an error that names it."""

import json
import os

import pytest
import torch

from spec_core.errors import ArtifactError, RunError, SpecError
from spec_trainer.offline.index import read_index
from spec_trainer.offline.shard import Shard, read_entry, write_shard

from .conftest import flip, forge


def shards(made) -> list[Shard]:
    index = read_index(made.folder.root)
    return [Shard(made.folder.root, entry, index.identity) for entry in index.shards]


def read_all(made) -> None:
    index = read_index(made.folder.root)
    for shard, entry in zip(shards(made), index.shards, strict=True):
        for sample in entry.samples:
            shard.read(sample)


def test_every_sample_comes_back_bit_for_bit(made):
    index = read_index(made.folder.root)
    for shard, entry, batch in zip(shards(made), index.shards, made.batches, strict=True):
        assert [sample.sample_id for sample in entry.samples] == [span.sample_id for span in batch.spans]
        for sample, span in zip(entry.samples, batch.spans, strict=True):
            stored, ids = shard.read(sample)
            torch.testing.assert_close(stored, batch.hidden_TNH[span.start : span.stop], rtol=0, atol=0)
            assert ids.tolist() == batch.input_ids_T[span.start : span.stop].tolist()


def test_safetensors_itself_reads_a_shard(made):
    from safetensors.torch import load_file

    tensors = load_file(made.folder.shard(1))
    assert torch.equal(tensors["hidden_states"], made.batches[1].hidden_TNH)
    assert torch.equal(tensors["input_ids"], made.batches[1].input_ids_T)


def test_a_flipped_bit_anywhere_in_a_shard_is_found_and_the_shard_is_named(made):
    file = made.folder.shard(1)
    sound = file.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(SpecError, match=r"features-00001\.safetensors") as caught:
            read_all(made)
        assert "run the capture again, which captures that shard only" in str(caught.value)
        assert "\n" not in str(caught.value)
    file.write_bytes(sound)
    read_all(made)


def test_a_flipped_feature_names_its_sample(made):
    flip(made.folder.shard(1), -1)  # the last tensor's last byte: of the last sample
    index = read_index(made.folder.root)
    shard = shards(made)[1]
    shard.read(index.shards[1].samples[0])
    with pytest.raises(RunError, match="sample 3 are damaged"):
        shard.read(index.shards[1].samples[1])


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_shard_that_was_cut_short_is_found_before_a_start(made, kept):
    file = made.folder.shard(0)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ArtifactError, match=r"features-00000\.safetensors is damaged"):
        shards(made)


def test_a_shard_that_is_not_there_is_found_before_a_start(made):
    made.folder.shard(0).unlink()
    with pytest.raises(ArtifactError, match=r"features-00000\.safetensors is missing; run the capture again"):
        shards(made)


def test_the_same_samples_make_the_same_file(made):
    file = made.folder.shard(0)
    first = file.read_bytes()
    for _ in range(5):
        write_shard(file, made.batches[0], made.identity)
        assert file.read_bytes() == first


def test_a_shard_that_could_not_be_written_leaves_nothing(made, tmp_path, full_disk):
    (tmp_path / "away").mkdir()
    file = tmp_path / "away" / "features-00000.safetensors"
    with full_disk(), pytest.raises(RunError, match=f"^{file} was not written: .*File too large"):
        write_shard(file, made.batches[0], made.identity)
    assert not list((tmp_path / "away").iterdir())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_shard_follows_the_umask(made, umask, mode):
    file = made.folder.shard(0)
    before = os.umask(umask)
    try:
        write_shard(file, made.batches[0], made.identity)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == mode


def rewrite_header(file, change):
    """The shard with another header; ``change`` edits its parsed JSON."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["input_ids"].update(data_offsets=[1, 2, 3]),
        lambda header: header["input_ids"].update(data_offsets=["0", "8"]),
        lambda header: header["input_ids"].update(shape=5),
        lambda header: header["hidden_states"].update(dtype=["BF16"]),
        lambda header: header["__metadata__"].update(spec_trainer="{}"),
        lambda header: header["__metadata__"].update(spec_trainer="[" * 100_000),
        lambda header: header.pop("__metadata__"),
        lambda header: json.loads("[" * 900 + "]" * 900),
    ],
)
def test_a_header_of_wrong_types_is_refused(made, change):
    file = made.folder.shard(0)
    rewrite_header(file, change)
    with pytest.raises(ArtifactError, match=r"features-00000\.safetensors is damaged; delete .*: ") as caught:
        read_entry(file, made.identity)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_shard(made):
    made.folder.shard(0).unlink()
    os.mkfifo(made.folder.shard(0))
    with pytest.raises(ArtifactError, match="is not a regular file"):
        shards(made)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_digest": "e" * 32},
        {"num_samples": 5},
        {"schema__dtype": "float16"},
        {"schema__hidden_size": 2},
        {"shard__token_digest": ["0" * 32, "1" * 32]},
        {"shard__checksum": ["0" * 32, "1" * 32]},
    ],
    ids=str,
)
def test_a_forged_index_with_a_fitting_checksum_is_refused(made, changes):
    forge(made.folder.root, **changes)
    with pytest.raises(
        ArtifactError, match=r"index\.json is damaged|features-0000.\.safetensors (holds other|is of another)"
    ):
        shards(made)
