"""The run directory: whose it is, who is in it, and what is left in it."""

import os
import shutil

import pytest
import yaml

from spec_core import StrategyConfig
from spec_core.errors import ArtifactError, ConfigError, RunError
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_strategy_megatron.strategy import MegatronStrategy
from spec_trainer.run.directory import RunDirectory, run_identity


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def identity(run, **changes) -> str:
    digests = {"data_digest": "d", "target_digest": "t"} | changes
    return run_identity(run.config, **digests)


@pytest.mark.parametrize(
    "word",
    ["train.lr=1e-3", "train.schedule=constant", "train.warmup_steps=3", "train.clip=2.0", "train.dtype=bfloat16",
     "train.global_batch_tokens=100", "seed=3", "draft.num_steps=3", "draft.loss=lk_alpha", "data.shuffle=false",
     "optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1", "optimizer.eps=1e-7", "optimizer.name=muon",
     "data.chat_template_kwargs.enable_thinking=false", "data.features_dtype=fp8_e4m3"],
)  # fmt: skip
def test_what_changes_the_result_changes_the_identity(resolved, word):
    assert identity(resolved(word)) != identity(resolved())


@pytest.mark.parametrize(
    "word",
    ["train.steps=9", "train.accumulation=2", "train.save_every=1", "train.eval_every=1", "train.keep=9",
     "timeouts.step_s=5", "data.packing=false", "engine.batch_tokens=4096", "profile.steps=[1]",
     "placement.kind=disaggregated", "draft.checkpoint_activations=true"],
)  # fmt: skip
def test_what_does_not_change_the_result_does_not_change_the_identity(resolved, word):
    assert identity(resolved(word)) == identity(resolved())


def test_fp8_changes_the_identity_where_it_is_on(resolved):
    config = resolved("train.dtype=bfloat16").config

    def with_fp8(value) -> str:
        train = config.train.model_copy(update={"fp8": value})
        return run_identity(config.model_copy(update={"train": train}), "d", "t")

    assert len({with_fp8(value) for value in (None, "frozen", "layers")}) == 3


def test_a_strategys_options_belong_to_the_identity_unless_they_change_speed_only(resolved):
    class Momentum(StrategyConfig):
        speed_only = frozenset({"bucket_mib"})
        momentum: float = 0.9
        bucket_mib: int = 25

    def with_options(**options) -> str:
        config = resolved().config
        strategy = Momentum(name="momentum", **options)
        return run_identity(config.model_copy(update={"strategy": strategy}), "d", "t")

    usual = with_options()
    assert with_options(bucket_mib=1) == with_options(momentum=0.9) == usual == identity(resolved())
    assert len({with_options(momentum=0.5), with_options(momentum=0.6), usual}) == 3


def test_options_of_the_strategies_here_change_speed_only():
    for strategy in (FsdpStrategy, MegatronStrategy):
        assert strategy.Config.model_fields.keys() - {"name"} == strategy.Config.speed_only


def test_data_and_target_are_part_of_the_identity(resolved):
    run = resolved()
    assert len({identity(run), identity(run, data_digest="x"), identity(run, target_digest="x")}) == 3


def test_a_directory_of_another_run_names_what_differs(directory, resolved):
    run = resolved()
    with directory.locked():
        directory.open(identity(run), run.config)
    with pytest.raises(ArtifactError, match=r"belongs to another run \(different: data\); choose"):
        directory.check_owner(identity(run, data_digest="x"))
    other = identity(run, data_digest="x", target_digest="x").replace("seed=", "seed=0")
    with pytest.raises(ArtifactError, match=r"\(different: data and seed and target\)"):
        directory.check_owner(other)


def test_a_directory_of_another_version_is_refused_without_its_digest(directory, resolved):
    run = resolved()
    with directory.locked():
        directory.open("372ee7bd867cdba8", run.config)
    with pytest.raises(ArtifactError, match=r"another run \(different: the version that began it\); choose"):
        directory.check_owner(identity(run))


def test_directory_is_taken_and_then_owned(directory, resolved):
    run = resolved()
    directory.check_owner("me")
    assert not directory.root.exists()
    with directory.locked():
        directory.open("me", run.config)
    directory.check_owner("me")
    with pytest.raises(ArtifactError, match="belongs to another run"):
        directory.check_owner("you")
    assert yaml.safe_load(directory.config.read_text()) == run.config.model_dump(mode="json")


def test_only_one_run_at_a_time(directory):
    with (
        directory.locked(),
        pytest.raises(ArtifactError, match="is in use by a run that is under way"),
        directory.locked(),
    ):
        pass
    with directory.locked():
        pass


def test_directory_of_something_else_is_not_touched(directory):
    directory.root.mkdir()
    (directory.root / "thesis.tex").touch()
    with pytest.raises(ArtifactError, match="is not empty and is no run directory"):
        directory.check_owner("me")


def test_empty_directory_may_become_a_run(directory):
    directory.root.mkdir()
    directory.check_owner("me")


def test_start_that_a_full_disk_ended_can_be_repeated(directory, resolved, full_disk):
    with (
        full_disk(),
        pytest.raises(RunError, match=r"\.identity was not written: .*large"),
        directory.locked(),
    ):
        directory.open("me", resolved().config)
    directory.check_owner("me")
    assert [path.name for path in directory.root.iterdir()] == [".lock"]


def test_start_that_was_killed_can_be_repeated(directory):
    directory.root.mkdir()
    (directory.root / ".lock").touch()
    (directory.root / ".identity.4711").touch()
    directory.check_owner("me")


@pytest.mark.parametrize("another", [False, True])
def test_a_run_notices_that_its_directory_is_no_longer_its_own(directory, resolved, another):
    config = resolved().config
    directory.root.mkdir()
    directory.open("me", config)
    directory.check_still_owned("me")
    shutil.rmtree(directory.root)
    if another:
        directory.root.mkdir()
        directory.open("you", config)
    with pytest.raises(RunError, match=f"^output {directory.root} was removed or replaced while this run"):
        directory.check_still_owned("me")


def fail_after(directory, config, prepare, error) -> None:
    with directory.locked():
        directory.open("me", config)
        prepare()
        raise error("late")


def test_usage_error_leaves_no_new_directory(directory, resolved):
    with pytest.raises(ConfigError):
        fail_after(directory, resolved().config, lambda: None, ConfigError)
    assert not directory.root.exists()


def test_usage_error_leaves_an_empty_directory_empty(directory, resolved):
    directory.root.mkdir()
    with pytest.raises(ConfigError):
        fail_after(directory, resolved().config, lambda: None, ConfigError)
    assert not list(directory.root.iterdir())


@pytest.mark.parametrize("error", [ConfigError, RunError])
def test_trained_steps_outlive_any_error(directory, resolved, error):
    step = directory.checkpoints / "step-5"
    with pytest.raises(error):
        fail_after(directory, resolved().config, step.mkdir, error)
    assert step.exists()


def test_usage_error_in_a_directory_that_was_there_removes_nothing(directory):
    directory.root.mkdir()
    (directory.root / "notes").touch()
    with pytest.raises(ConfigError), directory.locked():
        raise ConfigError("late")
    assert (directory.root / "notes").exists()


def test_open_clears_what_a_crash_cut_short(directory, resolved):
    directory.checkpoints.mkdir(parents=True)
    (directory.checkpoints / ".step-5" / "state").mkdir(parents=True)
    (directory.checkpoints / ".best").symlink_to("nowhere")
    (directory.checkpoints / "step-4").mkdir()
    (directory.root / ".identity").write_text("me\n")
    (directory.root / ".draft-x7").mkdir()
    directory.open("me", resolved().config)
    assert not list(directory.root.glob(".draft-*"))
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step-4"]


@pytest.mark.parametrize("name", ["draft", "checkpoints/step-4", "checkpoints/.step-5"])
def test_what_a_link_names_is_left_alone(directory, resolved, tmp_path, name):
    """A damaged checkpoint is none, and the draft is replaced as a whole: neither keeps a run from going on."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".step-1").mkdir(parents=True)
    directory.checkpoints.mkdir(parents=True)
    (directory.root / ".identity").write_text("me\n")
    (directory.root / name).symlink_to(elsewhere)
    directory.open("me", resolved().config)
    assert [path.name for path in elsewhere.iterdir()] == [".step-1"]


@pytest.mark.parametrize("name", ["checkpoints", "decoded", "logs", "metrics.jsonl"])
def test_nothing_is_removed_or_written_through_a_link(directory, resolved, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".step-1").mkdir(parents=True)
    directory.checkpoints.mkdir(parents=True)
    (directory.root / ".identity").write_text("me\n")
    entry = directory.root / name
    if entry.is_dir():
        entry.rmdir()
    entry.symlink_to(elsewhere)
    for use in (lambda: directory.open("me", resolved().config), directory.remove_unfinished):
        with pytest.raises(
            ArtifactError, match=rf"{name} is a link: expected a \w+ of its own; move it away"
        ):
            use()
    assert [path.name for path in elsewhere.iterdir()] == [".step-1"]


@pytest.mark.parametrize("name", [".lock", ".identity", "metrics.jsonl", "logs/trained-0.jsonl"])
def test_a_pipe_is_refused_and_never_waited_for(directory, name):
    directory.logs.mkdir(parents=True)
    (directory.root / ".identity").write_text("me\n")
    (directory.root / name).unlink(missing_ok=True)
    os.mkfifo(directory.root / name)
    take = directory.locked().__enter__ if name == ".lock" else lambda: directory.check_owner("me")
    with pytest.raises(ArtifactError, match=f"{name} is no file"):
        take()
