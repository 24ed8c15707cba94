"""From words to a run: layers, defaults, what is checked and what is not created."""

import json
from pathlib import Path

import pytest
import yaml

from spec_core.errors import ConfigError
from spec_trainer.cli.commands.plan import describe_run
from spec_trainer.plan.resolve import resolve, resolve_config, resolve_parts
from spec_trainer.run.dispatch import sample_bytes


def test_words_win_over_flags_and_flags_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: file\ndata: {path: file}\nseed: 1\ntrain: {lr: 0.1, clip: 3.0, steps: 5}\n")
    flags = {"target": "flag", "data.path": "flag"}
    config, _ = resolve_config(file, flags, ["data.path=word", "train.lr=1e-4"])
    assert (config.target, config.data.path, config.seed) == ("flag", "word", 1)
    assert (config.train.lr, config.train.clip, config.train.steps) == (1e-4, 3.0, 5)


def test_output_defaults_to_runs_and_the_files_stem(tmp_path):
    file = tmp_path / "friday.yaml"
    file.write_text("target: t\ndata: {path: d}\n")
    assert resolve_config(file, {}, [])[0].output == Path("runs/friday")
    assert resolve_config(file, {"output": "here"}, [])[0].output == Path("here")
    assert resolve_config(None, {"target": "models/big", "data.path": "d"}, [])[0].output == Path("runs/big")


def test_paths_that_exist_become_absolute_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("target").mkdir()
    config, _ = resolve_config(None, {"target": "target", "data.path": "owner/name:train"}, [])
    assert (config.target, config.data.path) == (str(tmp_path / "target"), "owner/name:train")


def test_folders_become_absolute_also_before_they_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = ["push.folder=weights", "push.options.file.folder=~/weights", "push.options.file.keep=5"]
    config, _ = resolve_config(None, {"target": "t", "data.path": "d"}, words)
    assert config.push.folder == tmp_path / "weights"
    assert config.push.options == {"file": {"folder": str(tmp_path / "home" / "weights"), "keep": 5}}


@pytest.mark.parametrize(
    ("transports", "ways"),
    [
        ([], "what is fastest there of collective, file, ipc"),
        (["push.transport=[ipc,file]"], "the first of ipc, file"),
    ],
)
def test_a_plan_says_how_weights_will_be_pushed(resolved, transports, ways):
    plan = describe_run(resolved("train.push_every=5", "push.to=[http://127.0.0.1:1]", *transports))
    assert plan["push"] == f"every 5 steps to http://127.0.0.1:1, by {ways}"


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "target").mkdir()
    config, _ = resolve_config(None, {"target": "~/target", "data.path": "~nobody/x"}, [])
    assert (config.target, config.data.path) == (str(tmp_path / "target"), "~nobody/x")


def test_nothing_is_created(resolved, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    run = resolved()
    describe_run(run)
    assert sorted(tmp_path.rglob("*")) == before
    assert not run.directory.root.exists()


def test_a_child_process_gets_the_same_parts_from_the_resolved_configuration(resolved):
    run = resolved("draft.num_steps=3", "draft.layers=[1,3]")
    parts = resolve_parts(json.loads(json.dumps(run.config.model_dump(mode="json"))))
    assert parts.config == run.config
    assert (parts.target, parts.schema) == (run.target, run.schema)
    assert parts.schema.layers == (1, 3, 8)


def test_draft_that_the_strategy_cannot_divide_is_refused(resolved, monkeypatch):
    def check(cls, config, target, hints):
        raise ConfigError(
            f"{config.name} does not divide {target.num_heads} into {hints.tensor_parallel.rows}"
        )

    monkeypatch.setattr("spec_strategy_fsdp.strategy.FsdpStrategy.check", classmethod(check))
    with pytest.raises(ConfigError, match=r"fsdp does not divide \d+ into .*midlayer\.mlp\.down_proj"):
        resolved()


def test_window_holds_two_global_batches_by_default(resolved):
    run = resolved("train.global_batch_tokens=70")
    assert run.window_bytes == 2 * sample_bytes(run.schema, 70)
    assert resolved("placement.window_bytes=99999").window_bytes == 99999


@pytest.mark.parametrize(
    ("ranks", "tokens"), [(8, 2 * 640), (9, 16 * 640 // 9 + 1), (32, 16 * 20), (640, 2 * 10)]
)
def test_windows_of_many_ranks_hold_sixteen_of_their_shares(resolved, ranks, tokens, monkeypatch):
    """Else each would have to have room for what all of them train. The host has room for so many processes."""
    monkeypatch.setattr("spec_trainer.plan.memory.free_host_bytes", lambda: 1 << 40)
    words = ["train.global_batch_tokens=640", f"train.ranks={ranks}", "placement.kind=disaggregated"]
    run = resolved(*words)
    assert run.window_bytes == sample_bytes(run.schema, tokens)


@pytest.mark.parametrize("features", [[], ["data.features=nowhere"]])
def test_samples_longer_than_the_targets_positions_are_refused(tiny_llama, tmp_path, words, features):
    """Whatever the engine, and without one: tiny_llama has 256 positions."""
    ids = [3 + number % 90 for number in range(257)]
    (tmp_path / "long.jsonl").write_text(json.dumps({"input_ids": ids, "loss_mask": [1] * 257}) + "\n")
    long = [*words, f"data.path={tmp_path / 'long.jsonl'}", *features]
    with pytest.raises(
        ConfigError, match=r"sample 0 has 257 tokens, .* 256 positions; set data.max_length=256"
    ):
        resolve(None, {}, long)
    resolve(None, {}, [*long[: len(words) + 1], "data.max_length=256"])


def test_window_holds_samples_that_are_longer_than_a_global_batch(resolved):
    run = resolved("train.global_batch_tokens=4")
    assert run.window_bytes == 2 * sample_bytes(run.schema, 10)


def test_description_counts_what_there_is(resolved, tiny_llama):
    document = describe_run(resolved("train.global_batch_tokens=50", "data.eval_samples=2"))
    assert document["target"] == str(tiny_llama)
    assert (document["samples"], document["held_out_samples"]) == (18, 2)
    assert document["tokens_per_epoch"] == 180
    assert document["captured_layers"] == [2, 4, 5, 8]
    assert document["features_bytes_per_token"] == 4 * 32 * 4
    assert document["frozen_tensor_bytes"] == 2 * 97 * 32 * 4
    json.dumps(document)


def test_features_in_8_bits_take_a_byte_for_a_number_and_four_for_a_row(resolved):
    run, plain = resolved("data.features_dtype=fp8_e4m3"), resolved()
    document = describe_run(run)
    assert document["features_bytes_per_token"] == 4 * (32 + 4)
    assert document["features_bytes"] == 20 * 10 * (4 * (32 + 4) + 8)
    assert run.window_bytes * (4 * 32 * 4 + 8) == plain.window_bytes * (4 * (32 + 4) + 8)


def test_dtype_that_the_backend_cannot_do_is_refused(resolved, monkeypatch):
    from spec_backend_cpu.backend import CpuBackend
    from spec_core.records import Capabilities

    monkeypatch.setattr(CpuBackend, "capabilities", classmethod(lambda cls: Capabilities()))
    with pytest.raises(ConfigError, match=r"train.dtype=bfloat16: backend 'cpu' trains in float32"):
        resolved("train.dtype=bfloat16")


def test_fp8_is_refused_where_it_cannot_be(words, make_target, monkeypatch):
    from spec_backend_cpu.backend import CpuBackend
    from spec_core.records import Capabilities

    dtypes = frozenset({"float32", "bfloat16"})
    monkeypatch.setattr(
        CpuBackend, "capabilities", classmethod(lambda cls: Capabilities(dtypes=dtypes, fp8=True))
    )
    fp8 = ["train.fp8=frozen", "train.dtype=bfloat16"]
    divisible = [*words, f"target={make_target('llama', vocab_size=96, hidden_size=32)}"]
    assert resolve(None, {}, [*divisible, *fp8]).config.train.fp8 == "frozen"
    refusals = {
        "train.fp8=frozen with train.dtype=float32: .*; set train.dtype=bfloat16 or remove": [*divisible, fp8[0]],
        "train.fp8=frozen: target .* has 97 tokens in its vocabulary, not a multiple of 16; remove": [*words, *fp8],
        "train.fp8=frozen with strategy.name=megatron: this strategy does not compute in fp8; remove": [
            *divisible, *fp8, "strategy.name=megatron"
        ],
    }  # fmt: skip
    for line, overrides in refusals.items():
        with pytest.raises(ConfigError, match=line):
            resolve(None, {}, overrides)
    able = Capabilities(dtypes=frozenset({"bfloat16"}))
    monkeypatch.setattr(CpuBackend, "capabilities", classmethod(lambda cls: able))
    with pytest.raises(
        ConfigError,
        match=r"train.fp8=frozen with backend.name=cpu: this backend has no fp8 products here; remove",
    ):
        resolve(None, {}, [*divisible, *fp8])


def test_unreadable_files_are_bad_input(words, monkeypatch):
    def denied(folder):
        raise PermissionError(13, "Permission denied", str(folder / "config.json"))

    monkeypatch.setattr("spec_kit.targets.target_reader.read_target", denied)
    with pytest.raises(ConfigError, match=r"config.json: Permission denied"):
        resolve(None, {}, words)


def test_a_directory_that_began_with_todays_defaults_goes_on_with_them(resolved):
    fresh = resolved()
    fresh.directory.root.mkdir(parents=True, exist_ok=True)
    fresh.directory.open(fresh.identity, fresh.config)
    assert resolved().identity == fresh.identity


def begun(run, **train):
    """Make the run's directory with a ``config.yaml`` in which ``train`` differs; None removes a key."""
    run.directory.root.mkdir(parents=True, exist_ok=True)
    run.directory.open(run.identity, run.config)
    stored = yaml.safe_load(run.directory.config.read_text())
    stored["train"] = {key: value for key, value in (stored["train"] | train).items() if value is not None}
    run.directory.config.write_text(yaml.safe_dump(stored))


def test_a_directory_that_balances_tokens_goes_on_so(resolved):
    fresh = resolved()
    assert fresh.schedule.settings.balance == "cost"
    begun(fresh, balance="tokens")
    again = resolved()
    assert (again.config.train.balance, again.schedule.settings.balance) == ("tokens", "tokens")
    assert again.identity == fresh.identity
    assert resolved("train.balance=cost").schedule.settings.balance == "cost"


def test_a_directory_that_balances_costs_goes_on_so(resolved):
    begun(resolved())
    assert resolved().schedule.settings.balance == "cost"
    assert resolved("train.balance=tokens").schedule.settings.balance == "tokens"


def test_a_directory_keeps_its_number_of_passes(resolved):
    begun(resolved(), accumulation=3)
    assert resolved().schedule.settings.accumulation == 3
    assert resolved("train.accumulation=2").schedule.settings.accumulation == 2
