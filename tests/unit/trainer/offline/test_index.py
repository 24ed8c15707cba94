"""index.json: what it says comes back, and what is not as it was written is refused."""

import json
from dataclasses import replace

import pytest

from spec_core.errors import ArtifactError
from spec_core.records import FeatureSchema
from spec_trainer.offline.index import INDEX_FILE, read_index, token_digest, write_index

from .conftest import flip, forge


def test_what_was_written_comes_back(made):
    index = read_index(made.folder.root)
    assert index.identity == made.identity
    assert index.complete
    assert [[s.sample_id for s in entry.samples] for entry in index.shards] == [[0, 1], [2, 3]]
    assert [[(s.offset, s.num_tokens) for s in entry.samples] for entry in index.shards] == [
        [(0, 3), (3, 5)],
        [(0, 1), (1, 4)],
    ]
    write_index(made.folder.root, index)
    assert read_index(made.folder.root) == index


def test_it_is_json_that_says_what_the_folder_holds(made):
    document = json.loads((made.folder.root / INDEX_FILE).read_text())
    assert document["schema"] == {
        "layers": [1, 3],
        "hidden_size": 4,
        "dtype": "bfloat16",
        "sent_dtype": "target",
    }
    assert document["target_digest"] == "t" * 40
    assert document["shards"][1]["file"] == "features-00001.safetensors"
    assert document["shards"][1]["num_tokens"] == [1, 4]


@pytest.mark.parametrize("position", [0, 3, 20, 200, 500, -3])
def test_a_changed_character_is_found(made, position):
    flip(made.folder.root / INDEX_FILE, position)
    with pytest.raises(ArtifactError, match="is damaged; delete it and run the capture again"):
        read_index(made.folder.root)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b'{"checksum": 1}', b"\xff"])
def test_other_content_is_found(made, content):
    (made.folder.root / INDEX_FILE).write_bytes(content)
    with pytest.raises(ArtifactError, match="is damaged"):
        read_index(made.folder.root)


def test_a_folder_without_index_is_none_of_ours(tmp_path):
    with pytest.raises(
        ArtifactError, match=r"holds no index.json: it is no folder that spec-trainer capture"
    ):
        read_index(tmp_path)


def test_differences_are_named_one_by_one(made):
    identity = made.identity
    assert identity.differences(identity) == []
    other = replace(
        identity,
        schema=FeatureSchema(layers=(1, 2), hidden_size=4, dtype="float32"),
        target_digest="u" * 40,
        num_samples=5,
    )
    assert identity.differences(other) == [
        "target tttttttttttt there, uuuuuuuuuuuu here",
        "layers [1, 3] there, [1, 2] here",
        "dtype bfloat16 there, float32 here",
        "samples 4 there, 5 here",
    ]


def test_token_digests_tell_ids_and_lengths_apart(made):
    import numpy as np

    some = np.array([1, 2, 3], dtype=np.int32)
    assert token_digest(some) == token_digest(some.astype(np.int64))
    assert len({token_digest(ids) for ids in (some, some[:2], some[::-1], some + 1)}) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"shard__file": 5},
        {"shard__file": None},
        {"shard__file": "../features-00000.safetensors"},
        {"shard__file": "/etc/passwd"},
        {"shard__file": "features-00001.safetensors"},
        {"shard__offset": ["0", "3"]},
        {"shard__offset": [0.0, 3.0]},
        {"shard__offset": [0, None]},
        {"shard__offset": [0, 4]},
        {"shard__offset": [0]},
        {"shard__num_tokens": [3, -5]},
        {"shard__num_tokens": [3, 10**400]},
        {"shard__checksum": [1, 2]},
        {"shard__token_digest": {}},
        {"complete": "no"},
        {"num_samples": "x"},
        {"shards": 5},
        {"target_digest": 5},
        {"schema__layers": [3, 1]},
        {"schema__dtype": "x"},
        {"schema__hidden_size": 4.5},
        {"extra": 1},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_an_index_of_wrong_types_with_the_right_checksum_is_refused(made, changes):
    forge(made.folder.root)
    read_index(made.folder.root)
    forge(made.folder.root, **changes)
    with pytest.raises(ArtifactError, match=r"index\.json is damaged; delete it .*: ") as caught:
        read_index(made.folder.root)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_index_that_is_nested_without_end_is_damaged(made):
    (made.folder.root / INDEX_FILE).write_text('{"a":' * 200_000)
    with pytest.raises(ArtifactError, match=r"is damaged; .*: it is nested too deeply"):
        read_index(made.folder.root)
