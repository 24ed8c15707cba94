"""data.features before a start: what fits is opened, everything else is one line."""

import json

import pytest

from spec_core.errors import ArtifactError, ConfigError
from spec_trainer.offline.store import open_features


def test_every_sample_is_found_by_its_tokens_whatever_its_number(capture, resolved):
    """Another split, order and mask: the features are the same."""
    folder = capture("data.eval_samples=5")
    run = resolved(f"data.features={folder}", "data.eval_samples=2", "data.last_turn_only=true")
    store = open_features(run)
    assert sorted(store.places) == list(range(20))
    for sample in run.dataset.samples:
        shard, stored = store.places[sample.sample_id]
        _, ids = shard.read(stored)
        assert ids.tolist() == sample.input_ids.tolist()


def test_more_layers_than_the_draft_needs_are_fine_and_fewer_are_not(capture, resolved):
    folder = capture("draft.layers=[1,2,4,5]")
    resolved(f"data.features={folder}", "draft.layers=[2,5]")
    with pytest.raises(
        ArtifactError, match=r"holds layers \[1, 2, 4, 5, 8\], draft eagle3 needs .*\(\[3\] missing\)"
    ):
        resolved(f"data.features={folder}", "draft.layers=[1,3]")


def test_features_of_another_dtype_are_refused(capture, resolved):
    folder = capture("data.features_dtype=fp8_e4m3")
    with pytest.raises(
        ArtifactError, match=r"captured with data.features_dtype=fp8_e4m3, this run has target; set"
    ):
        resolved(f"data.features={folder}")


def test_another_target_is_refused(capture, resolved, make_target):
    folder = capture()
    with pytest.raises(ArtifactError, match="was captured from another target than"):
        resolved(f"data.features={folder}", f"target={make_target('llama', initializer_range=0.3)}")


def test_data_that_was_not_captured_is_refused_with_the_place_of_the_first_row(capture, resolved, tmp_path):
    folder = capture()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows[7]["input_ids"][-1] += 1
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"data.features={folder}", "data.eval_samples=0"]
    with pytest.raises(
        ArtifactError, match=r"no features of 1 of 20 samples, first sample 7 \(.*other.jsonl:8\), 10 tokens"
    ):
        resolved(*keys, f"data.path={other}")
    with pytest.raises(ArtifactError, match="no features of 20 of 20 samples"):
        resolved(*keys, "data.max_length=9")


def test_a_folder_that_is_not_complete_is_refused(capture, resolved, tmp_path):
    with pytest.raises(ArtifactError, match="no such folder; make one with spec-trainer capture"):
        resolved(f"data.features={tmp_path / 'nowhere'}")
    folder = capture()
    (folder / "features-00001.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"features-00001.safetensors is missing; run the capture again"):
        resolved(f"data.features={folder}")
    (folder / "index.json").unlink()
    with pytest.raises(ArtifactError, match=r"holds no index.json"):
        resolved(f"data.features={folder}")


@pytest.mark.parametrize(
    "key",
    [
        "engine.replicas=2",
        "engine.tensor_parallel=2",
        "placement.kind=colocated",
        "placement.window_bytes=1000000",
    ],
)
def test_what_asks_for_an_engine_is_refused(resolved, key):
    with pytest.raises(ConfigError, match=f"{key} with data.features: .* no engine starts; remove one"):
        resolved("data.features=somewhere", key)


def test_plan_says_that_no_engine_starts(capture, resolved):
    from spec_trainer.cli.commands.plan import describe_run

    folder = capture()
    document = describe_run(resolved(f"data.features={folder}", "train.ranks=2"))
    assert document["processes"] == [
        "trainer rank 0 (fsdp), backend cpu",
        "trainer rank 1 (fsdp), backend cpu",
    ]
    assert document["features"] == str(folder)
    assert document["features_bytes"] == 20 * 10 * (4 * 32 * 4 + 8)
    assert describe_run(resolved(f"data.features={folder}"))["processes"] == [
        "this process: trainer rank 0 (fsdp), backend cpu"
    ]


def test_relative_folders_become_absolute(capture, resolved, monkeypatch):
    folder = capture()
    monkeypatch.chdir(folder.parent)
    assert resolved("data.features=features").config.data.features == str(folder)
