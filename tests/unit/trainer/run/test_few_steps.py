"""Runs that end before their draft has learned much are warned of, with words that help."""

import pytest

from spec_trainer.configuration.run import TrainConfig
from spec_trainer.run.few_steps import few_steps_warning


@pytest.mark.parametrize(("warmup", "num_steps"), [(20, 100), (0, 100), (400, 2000)])
def test_enough_steps_are_not_warned_of(warmup, num_steps):
    assert few_steps_warning(TrainConfig(warmup_steps=warmup), num_steps) is None


@pytest.mark.parametrize(
    ("train", "num_steps", "words"),
    [
        ({"epochs": 2}, 19, ["much: 19, 19 of them warm-up", "train.epochs=11,", "train.warmup_steps=3 for"]),
        (
            {"steps": 50},
            50,
            ["much: 50, 20 of them warm-up", "train.steps=100,", "train.warmup_steps=10 for"],
        ),
        ({"warmup_steps": 400}, 1999, ["2000 or more are advised", "train.warmup_steps=399"]),
    ],
)
def test_few_steps_are_named_with_what_gives_enough(train, num_steps, words):
    line = few_steps_warning(TrainConfig(**train), num_steps)
    assert [word for word in words if word not in line] == []
    assert "\n" not in line


def test_where_the_user_does_not_set_the_steps_the_advice_is_what_the_user_sets():
    line = few_steps_warning(TrainConfig(steps=50), 50, "give a larger --budget")
    assert line.endswith("; 100 or more are advised; give a larger --budget")
    assert "train." not in line


def test_a_short_warm_up_is_left_as_it_is():
    assert "for a short trial" not in few_steps_warning(TrainConfig(warmup_steps=2), 50)


def test_the_advised_epochs_give_enough_steps():
    line = few_steps_warning(TrainConfig(epochs=3), 7 * 3)
    epochs = int(line.split("train.epochs=")[1].split(",")[0])
    assert epochs * 7 >= 100 > (epochs - 1) * 7
