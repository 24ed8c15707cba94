import subprocess
import sys

import pytest

from spec_core import DataParallel
from spec_core.errors import ConfigError
from spec_core.records import Capabilities
from spec_core.validation import validate
from spec_launcher_local.launcher import LocalLauncher
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_trainer.configuration.run import AnyRunConfig, run_config_type
from spec_trainer.run.members import members, on_hosts


def config(
    kind: str, replicas: int, ranks: int, decode: dict[str, int] | None = None, **fractions: float
) -> AnyRunConfig:
    values = {
        "target": "t",
        "output": "o",
        "data": {"path": "d"},
        "backend": {"name": "b"},
        "draft": {"name": "d"},
        "engine": {"name": "e", "replicas": replicas},
        "train": {"ranks": ranks},
        "placement": {"kind": kind, **fractions},
        "decode": decode or {},
    }
    return validate(run_config_type(strategy=FsdpStrategy.Config), values, "test")


def places(found: AnyRunConfig, capabilities: Capabilities) -> list[tuple[str, int, float, float | None]]:
    return [(m.name, m.first_device, m.share, m.memory_fraction) for m in members(found, capabilities)]


def test_disaggregated_processes_have_devices_of_their_own() -> None:
    assert places(config("disaggregated", 1, 2), Capabilities(num_devices=4, memory_limit=True)) == [
        ("engine-0", 0, 1.0, None),
        ("trainer-0", 1, 1.0, None),
        ("trainer-1", 2, 1.0, None),
    ]


def test_colocated_engine_and_rank_share_a_device_by_their_fractions() -> None:
    found = config("colocated", 2, 2, trainer_fraction=0.25)
    assert places(found, Capabilities(num_devices=2, memory_limit=True)) == [
        ("engine-0", 0, 0.75, 0.75),
        ("engine-1", 1, 0.75, 0.75),
        ("trainer-0", 0, 0.25, 0.25),
        ("trainer-1", 1, 0.25, 0.25),
    ]


def test_decoding_engines_come_after_capturing_ones_and_share_their_settings() -> None:
    decoding = {"every": 10, "replicas": 2}
    apart, together = config("disaggregated", 1, 1, decoding), config("colocated", 1, 1, decoding)
    assert places(apart, Capabilities(num_devices=4)) == [
        ("engine-0", 0, 1.0, None),
        ("decoder-0", 1, 1.0, None),
        ("decoder-1", 2, 1.0, None),
        ("trainer-0", 3, 1.0, None),
    ]
    assert places(together, Capabilities(num_devices=1, memory_limit=True)) == [
        ("engine-0", 0, 0.5 / 3, 0.5 / 3),
        ("decoder-0", 0, 0.5 / 3, 0.5 / 3),
        ("decoder-1", 0, 0.5 / 3, 0.5 / 3),
        ("trainer-0", 0, 0.5, 0.5),
    ]


@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_shares_of_a_device_never_exceed_it(kind, replicas, ranks) -> None:
    for devices in (1, 2):
        found = members(config(kind, replicas, ranks), Capabilities(num_devices=devices))
        assert len(found) == replicas + ranks
        for device in range(devices):
            assert sum(member.share for member in found if member.first_device == device) <= 1 + 1e-9
        assert all(member.memory_fraction is None for member in found)


def test_engines_of_a_device_begin_one_after_the_other_and_ranks_after_them() -> None:
    limited = Capabilities(num_devices=2, memory_limit=True)
    found = members(config("colocated", 3, 2), limited)
    assert [(m.name, m.init_order) for m in found] == [
        ("engine-0", 0),
        ("engine-1", 0),
        ("engine-2", 1),
        ("trainer-0", 2),
        ("trainer-1", 2),
    ]
    assert {m.init_order for m in members(config("disaggregated", 1, 1), limited)} == {0}
    assert {m.init_order for m in members(config("colocated", 3, 2), Capabilities(num_devices=2))} == {0}


@pytest.mark.parametrize(("replicas", "ranks", "turns"), [(1, 2, {1}), (2, 1, {1}), (1, 1, {0}), (3, 4, {2})])
def test_ranks_begin_together_also_where_some_have_a_device_to_themselves(replicas, ranks, turns) -> None:
    """They are ready together: one that waited for the others to be would wait for ever."""
    found = members(config("disaggregated", replicas, ranks), Capabilities(num_devices=2, memory_limit=True))
    assert {m.init_order for m in found if m.role == "trainer"} == turns


def test_disaggregated_processes_of_one_device_are_limited_all_the_same() -> None:
    found = members(config("disaggregated", 1, 2), Capabilities(num_devices=2, memory_limit=True))
    assert [(m.name, m.memory_fraction) for m in found] == [
        ("engine-0", 0.5),
        ("trainer-0", None),
        ("trainer-1", 0.5),
    ]


def test_with_features_in_a_folder_there_are_no_engines() -> None:
    found = config("disaggregated", 1, 3)
    found = found.model_copy(update={"data": found.data.model_copy(update={"features": "f"})})
    assert places(found, Capabilities(num_devices=2)) == [
        ("trainer-0", 0, 0.5, None),
        ("trainer-1", 1, 1.0, None),
        ("trainer-2", 0, 0.5, None),
    ]


def test_a_launcher_needs_no_torch() -> None:
    """It trains nothing: hundreds of megabytes and seconds for nothing."""
    modules = "spec_trainer.cli.commands.train, spec_trainer.workers.worker_driver"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_members_have_the_hosts_that_the_launcher_names() -> None:
    found = members(config("disaggregated", 1, 1), Capabilities(num_devices=2))
    placed = on_hosts(found, {"engine-0": "h1", "trainer-0": "h2"})
    assert [(member.name, member.host) for member in placed] == [("engine-0", "h1"), ("trainer-0", "h2")]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (8, (6, 2, 1)),
        (9, (6, 2, 1)),  # never more than was asked for
        (7, (5, 1, 2)),
        (4, (3, 1, 2)),
        (1, (1, 1, 6)),  # the last engine and the last rank share a device
    ],
)
def test_a_run_has_as_many_ranks_as_have_room_on_the_devices_that_are_left(
    resolved, monkeypatch, devices, expected
) -> None:
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: 8)
    run = resolved("placement.kind=disaggregated", "engine.replicas=2", "train.ranks=6")
    assert len(run.members()) == 8
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: devices)
    now = run.with_room()
    config = now.config
    assert (config.train.ranks, config.engine.replicas, config.train.accumulation) == expected
    assert (
        now.schedule.num_shares
        == config.train.ranks
        == sum(member.role == "trainer" for member in now.members())
    )
    items = [next(one.schedule.items(0)) for one in (run, now)]
    assert items[0] == items[1]
    assert now.identity == run.identity


def test_processes_that_shared_devices_before_may_do_so_again(resolved, monkeypatch) -> None:
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: 2)
    run = resolved("placement.kind=colocated", "engine.replicas=4", "train.ranks=4")
    run.members()
    assert run.with_room().config == run.config
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: 1)
    config = run.with_room().config
    assert (config.train.ranks, config.engine.replicas) == (2, 2)


def test_a_strategy_has_only_numbers_of_ranks_that_it_takes(resolved, monkeypatch) -> None:
    def in_pairs(cls, config, rank, world_size):
        if world_size % 2:
            raise ConfigError("planted")
        return DataParallel(rank // 2, world_size // 2)

    monkeypatch.setattr(FsdpStrategy, "data_parallel", classmethod(in_pairs))
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: 7)
    run = resolved("placement.kind=disaggregated", "train.ranks=6")
    run.members()
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: 6)
    assert run.with_room().config.train.ranks == 4
    monkeypatch.setattr(LocalLauncher, "num_devices", lambda self: 1)
    assert run.with_room().config.train.ranks == 2
