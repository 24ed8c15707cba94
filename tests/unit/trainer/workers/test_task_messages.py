"""A rank gets the part of a run that the controller has, and no file has its samples."""

import json

import numpy as np

from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.data.store import open_dataset, saved_dataset
from spec_trainer.workers.protocol import from_json
from spec_trainer.workers.run_driver import RankTask
from spec_trainer.workers.task_messages import task_message, task_part


def test_a_rank_gets_the_same_steps_of_the_same_samples(resolved):
    spec = resolved()
    draw = np.random.default_rng(3)
    samples = tuple(
        Sample(number, draw.integers(0, 97, length).astype(np.int32), draw.random(length) < 0.5)
        for number, length in enumerate((1, 7, 8, 9, 40))
    )
    answers = Dataset(samples, (), DataReport())
    part = spec.cycle(answers, range(4, 9), global_batch_tokens=1, shuffle=False).resuming("step-4")
    task = RankTask(entry="package.module:name", arguments={"drafts": ["a"]})
    message = from_json(json.loads(json.dumps(task_message(task, part, {"requests": 5}).to_json())))
    found = task_part(spec, message)
    assert (message.entry, message.arguments, message.notes) == (
        task.entry,
        {"drafts": ["a"]},
        {"requests": 5},
    )
    assert found.dataset.digest == answers.digest
    assert found.config.train.resume_from == "step-4"
    assert list(found.schedule.items(4)) == list(part.schedule.items(4))
    assert [item.sample_ids for item in found.schedule.items(4)] == [(number,) for number in range(5)]
    found.dataset.samples[0].input_ids[0] = 1  # torch takes no array that cannot be written


def test_a_run_without_data_has_an_empty_dataset(tmp_path):
    with saved_dataset(Dataset((), (), DataReport()), tmp_path) as folder:
        assert open_dataset(folder).samples == ()
