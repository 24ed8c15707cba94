"""A plan as text for people."""

from spec_trainer.cli.commands.plan import with_sizes


def test_numbers_of_bytes_are_shown_in_gib_or_mib_and_others_as_they_are():
    plan = {
        "features_bytes": 21_801_189_376,
        "features_bytes_per_token": 3456,
        "samples": 2_000_000_000,
        "resources": {"memory": {"free_bytes": 3 << 30, "parts": {"weights": 5 << 20}}},
        "rank_memory": {"gradients": 1 << 30},
        "device_memory": {"trainer-0": {"devices": [0], "limit_bytes": 1 << 31}},
    }
    assert with_sizes(plan) == {
        "features_bytes": "20.3 GiB",
        "features_bytes_per_token": 3456,
        "samples": 2_000_000_000,
        "resources": {"memory": {"free_bytes": "3.0 GiB", "parts": {"weights": "5.0 MiB"}}},
        "rank_memory": {"gradients": "1.0 GiB"},
        "device_memory": {"trainer-0": {"devices": [0], "limit_bytes": "2.0 GiB"}},
    }
