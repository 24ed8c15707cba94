"""A training command says how far it is, and warns of steps that train nothing."""

import json
import logging

import pytest

from spec_trainer.base.stop_request import Interrupted
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.commands.train import run_training


def test_steps_that_are_only_timed_have_no_number_and_no_time_left(resolved, caplog):
    run = resolved("train.steps=100000", "train.warmup_steps=0")
    with caplog.at_level(logging.INFO, "spec_trainer.base.progress"), pytest.raises(Interrupted):
        run_training(run, steps_limit=TimeLimit(0.0, has_begun=False))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines
    assert lines[0].startswith("step 1 loss ")
    assert not [line for line in lines if "100000" in line or " left" in line]


@pytest.mark.parametrize(("draft", "size", "warns"), [("eagle3", 2, 1), ("peagle", 2, 1), ("eagle3", 90, 0)])
def test_a_run_without_any_loss_warns_once(resolved, tmp_path, caplog, draft, size, warns):
    rows = ({"input_ids": [n, *[50] * 20], "loss_mask": [0] + [1] * 20} for n in range(3, 23))
    (tmp_path / "same.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (f"data.path={tmp_path / 'same.jsonl'}", f"draft.name={draft}", f"draft.vocab_size={size}")
    run_training(resolved(*words, "train.steps=2", "train.global_batch_tokens=40"))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    lines = [line for line in warnings if "loss 0" in line]
    assert len(lines) == warns
    assert all(line.startswith("step 1: loss 0: ") and "draft.vocab_size" in line for line in lines)
