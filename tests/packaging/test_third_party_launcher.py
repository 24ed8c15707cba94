"""A third party's launcher runs a training of three workers, from wheels, without a changed line here."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_third_partys_launcher_runs_a_training(train, losses_of):
    apart = ("--launcher", "pipes", "placement.kind=disaggregated")
    output = train(
        *apart, "launcher.nice=5", "train.ranks=2", "train.steps=3", "train.global_batch_tokens=200"
    )
    assert len(losses_of(output)) == 3
    assert (output / "draft" / "config.json").exists()
    assert {file.name for file in (output / "logs").glob("*-[0-9].log")} == {
        "engine-0.log",
        "trainer-0.log",
        "trainer-1.log",
    }
    with pytest.raises(AssertionError, match=r"unknown key 'launcher.colour'"):
        train(*apart, "launcher.colour=blue")
