import pytest

from spec_core.errors import ConfigError
from spec_core.records import Capabilities
from spec_trainer.configuration.run import PlacementConfig
from spec_trainer.run.memory_budget import GIB, MemoryBudget

PAIR = ["engine", "trainer"]
DEVICE = Capabilities(device_ipc=True, memory_limit=True, device_bytes=80 * GIB, process_bytes=GIB)


def colocated(**fractions: float) -> PlacementConfig:
    return PlacementConfig(kind="colocated", **fractions)


def uncounted(budget: MemoryBudget, crowd: list[str]) -> float:
    return sum(budget.uncounted_bytes(role) for role in crowd) / (80 * GIB)


@pytest.mark.parametrize("crowd", [PAIR, ["engine", *PAIR], ["engine", "trainer", "trainer"]])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"engine_fraction": 0.3},
        {"trainer_fraction": 0.6},
        {"engine_fraction": 0.4, "trainer_fraction": 0.5},
    ],
)
def test_limits_contexts_and_windows_fit_the_device(crowd, said) -> None:
    budget = MemoryBudget(DEVICE, GIB)
    limits = budget.fractions(colocated(**said), crowd)
    assert limits.items() >= {key.removesuffix("_fraction"): value for key, value in said.items()}.items()
    taken = sum(limits.values()) + uncounted(budget, crowd)
    assert taken == pytest.approx(1) if len(said) < 2 else taken <= 1


def test_what_is_left_open_is_halved() -> None:
    assert MemoryBudget(DEVICE, 2 * GIB).fractions(colocated(), PAIR) == {"engine": 0.475, "trainer": 0.475}
    assert MemoryBudget(DEVICE, 2 * GIB).even_fraction(["trainer", "trainer"]) == pytest.approx(74 / 80 / 2)


def test_a_window_in_the_memory_of_the_host_takes_nothing_of_the_device() -> None:
    on_host = Capabilities(memory_limit=True, device_bytes=80 * GIB, process_bytes=GIB)
    assert MemoryBudget(on_host, 40 * GIB).uncounted_bytes("trainer") == GIB


def test_where_the_memory_is_not_known_only_the_fractions_count() -> None:
    unknown = Capabilities(device_ipc=True, memory_limit=True, process_bytes=GIB)
    budget = MemoryBudget(unknown, 40 * GIB)
    assert budget.fractions(colocated(engine_fraction=0.5, trainer_fraction=0.5), PAIR) == {
        "engine": 0.5,
        "trainer": 0.5,
    }


@pytest.mark.parametrize(
    ("said", "window", "words"),
    [
        (
            {"engine_fraction": 0.5, "trainer_fraction": 0.5},
            3 * GIB,
            [
                "engine_fraction=0.5 (40.0 GiB)",
                "2 processes with a context each (2.0 GiB)",
                f"placement.window_bytes={3 * GIB} (3.0 GiB)",
                "lower the fractions to 0.937 together",
            ],
        ),
        (
            {"engine_fraction": 0.99},
            GIB,
            ["engine_fraction=0.99 (79.2 GiB)", "and leave memory to the rest; lower the fractions to 0.962"],
        ),
        ({}, 90 * GIB, ["90.0 GiB", "a device of 80.0 GiB does not hold", "; lower placement.window_bytes"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is_and_what_to_lower(said, window, words) -> None:
    with pytest.raises(ConfigError) as refusal:
        MemoryBudget(DEVICE, window).fractions(colocated(**said), PAIR)
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)
