"""Run the cycles of ``decode.every``: an engine answers prompts, and the run trains on the answers.

At the end of a cycle the trained draft is pushed into the engine. A cycle starts from a checkpoint, even if nothing
was interrupted, and trains on answers that are on disk. So its result is the same bit for bit, however often it was
interrupted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_core.errors import ArtifactError, ConfigError
from spec_trainer.data.batching import epoch_order
from spec_trainer.data.dataset import Dataset
from spec_trainer.report.page import write_report
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.model_card import write_run_card
from spec_trainer.run.spec import RunSpec
from spec_trainer.run.timer import Timer
from spec_trainer.training.checkpoint.store import read_weights
from spec_trainer.training.wiring import new_module
from spec_trainer.workers.decoded_folder import HELD_OUT, DecodedFolder, cycle_dataset
from spec_trainer.workers.passes import Pass, pass_seed
from spec_trainer.workers.run_driver import RunDriver

log = logging.getLogger(__name__)

_APART = 2**-6
"""Relative change of a weight that is two units in the last place of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One cycle of a run. Its number and the configuration determine its steps and its draft version."""

    number: int
    steps: range
    version: int
    """Version of the served draft, which is the number of steps that it was trained for."""


def cycles_left(spec: RunSpec, done_steps: int) -> list[Cycle]:
    """Return the cycles left after ``done_steps`` steps; if the run is complete, only the last cycle."""
    every = spec.config.decode.every
    total = spec.schedule.total_steps
    first = min(done_steps, total - 1) // every
    return [
        Cycle(
            number=number,
            steps=range(number * every, min((number + 1) * every, total)),
            version=_served_version(spec, number * every),
        )
        for number in range(first, (total - 1) // every + 1)
    ]


def prompts_of(spec: RunSpec, cycle: int) -> list[list[int]]:
    """Return the token ids of a cycle's prompts.

    They are the next ``decode.prompts`` prompts of repeated, shuffled passes over the data.
    """
    samples = spec.source.train
    per_cycle = spec.config.decode.prompts
    positions = range(cycle * per_cycle, (cycle + 1) * per_cycle)
    orders = {
        epoch: epoch_order(len(samples), spec.config.seed, epoch)
        if spec.config.data.shuffle
        else range(len(samples))
        for epoch in {position // len(samples) for position in positions}
    }
    chosen = [samples[orders[position // len(samples)][position % len(samples)]] for position in positions]
    return [_prompt(sample.prompt) for sample in chosen]


def train_with_decode(spec: RunSpec, driver: RunDriver) -> None:
    """Alternate between decoding and training until the run is complete."""
    _Run(spec, driver).from_step(spec.start_step)


class _Run:
    def __init__(self, spec: RunSpec, driver: RunDriver) -> None:
        self._spec = spec
        self._driver = driver
        self._folder = DecodedFolder(spec.directory)
        self._timer = Timer()
        """Seconds spent outside the ranks, such as on decoding and pushes."""

    def from_step(self, done_steps: int) -> None:
        self._folder.remove_drafts_after(done_steps)
        for cycle in cycles_left(self._spec, done_steps):
            if cycle.version == cycle.steps.start == done_steps:
                self._draft(cycle.version)  # later its checkpoint may be gone
            figures = self._decode(cycle)
            answers = cycle_dataset(self._spec.config, cycle.number)
            _check_tokens(answers, self._spec)
            part = self._spec.cycle(answers, cycle.steps)
            prefill_s = self._driver.train(part.starting_at(done_steps), _notes(figures))
            figures["prefill_s"] = figures.get("prefill_s", 0.0) + prefill_s
            self._folder.write_figures(cycle.number, figures)
            done_steps = max(done_steps, cycle.steps.stop)
        self._finish(done_steps)

    def _decode(self, cycle: Cycle) -> dict[str, Any]:
        """Answer the prompts of a cycle, unless the answers are on disk; return the cycle's figures."""
        figures = self._folder.figures(cycle.number)
        if figures is not None and "decode_acceptance_length" in figures and self._folder.has(cycle.number):
            return figures
        prompts = prompts_of(self._spec, cycle.number)
        log.info(
            "cycle %d: answering %d prompts with draft version %d", cycle.number, len(prompts), cycle.version
        )
        figures = self._measure(cycle.number, cycle.version)
        decoded = self._answer(prompts, f"cycle {cycle.number}")
        _check_depths(decoded, self._spec)
        figures |= self._figures("decode", decoded)
        self._folder.write_figures(cycle.number, figures)
        self._folder.write_answers(f"cycle-{cycle.number}", prompts, decoded.answers)
        return figures

    def _measure(self, cycle: int, version: int) -> dict[str, Any]:
        """Serve a version of the draft, answer the held-out prompts with it, and return the figures."""
        draft = self._draft(version)
        with self._timer("push"):
            self._driver.serve(version, draft)
        self._folder.keep_only(version)
        figures: dict[str, Any] = {"cycle": cycle, "draft_version": version}
        if not self._spec.source.held_out:
            return figures
        prompts = [_prompt(sample.prompt) for sample in self._spec.source.held_out]
        decoded = self._answer(prompts, HELD_OUT)
        if not self._folder.has_held_out():
            self._folder.write_answers(HELD_OUT, prompts, decoded.answers)
        return figures | self._figures(HELD_OUT, decoded)

    def _answer(self, prompts: list[list[int]], what: str) -> Pass:
        with self._timer("decode"):
            return self._driver.answer(prompts, pass_seed(self._spec.config.seed, what))

    def _figures(self, what: str, decoded: Pass) -> dict[str, Any]:
        """Return the figures of ``decoded``, the answers that were generated last.

        ``what``: the beginning of the figures' names.
        """
        return {
            f"{what}_acceptance_length": decoded.counters.acceptance_length,
            f"{what}_acceptance_per_position": decoded.counters.acceptance_per_position,
            f"{what}_rounds": decoded.counters.rounds,
            f"{what}_tokens": decoded.num_tokens,
            f"{what}_s": self._timer.last_s["decode"],
        }

    def _draft(self, version: int) -> Path:
        """Return the folder of a draft version; export it from its checkpoint if the folder does not exist."""
        folder = self._folder.draft(version)
        spec = self._spec
        if not folder.exists():
            weights = (
                read_weights(spec.strategy_type, spec.directory.checkpoints / f"step-{version}")
                if version
                else first_weights(spec)
            )
            export_draft(spec.draft, weights, spec.target, folder)
        return folder

    def _finish(self, done_steps: int) -> None:
        """At the end of the run measure the served draft, and write the figures of all cycles to the summary."""
        summary = self._spec.directory.read_summary()
        if "cycles" in summary:  # the run was complete before this command
            return
        last = 1 + cycles_left(self._spec, done_steps)[-1].number
        version = _served_version(self._spec, done_steps)
        figures = self._folder.figures(last)
        if figures is None or figures["draft_version"] != version:  # the run was shorter before
            self._folder.write_figures(last, self._measure(last, version))
        cycles = [figures for number in range(last + 1) if (figures := self._folder.figures(number))]
        key = f"{HELD_OUT}_acceptance_length"
        if key in cycles[-1]:
            summary |= {"acceptance_length": cycles[-1][key], "acceptance_length_before": cycles[0][key]}
        self._timer.total_s |= {
            name: seconds for name, seconds in summary["time_s"].items() if name != "other"
        }
        summary |= {"cycles": cycles, "time_s": self._timer.breakdown()}
        spec = self._spec
        spec.directory.write_summary(summary)
        write_run_card(spec.directory.draft, spec.draft, spec.target, spec.config, summary)
        write_report(self._spec.directory, f"Training of {summary['description']}", summary)


def _served_version(spec: RunSpec, done_steps: int) -> int:
    """Return the version of the draft that engines serve after ``done_steps`` steps of the run.

    If the run makes no pushes, it is 0: the first draft.
    """
    every = spec.config.train.push_every
    if not every:
        return 0
    return done_steps if done_steps == spec.schedule.total_steps else done_steps // every * every


def first_weights(spec: RunSpec) -> dict[str, Any]:
    """Return the run's initial weights, with small changes so that no tensor equals the target's head.

    An engine may share a tensor with the target if both are equal at the start. It could then never update
    the draft's tensor. So the largest weight of such a tensor is changed, by enough to differ in every dtype.
    """
    import torch

    from spec_kit.targets.target_reader import read_target_tensors

    tensors = read_target_tensors(spec.target)
    weights = new_module(spec, tensors).state_dict()
    head_VH = tensors.head_VH
    for tensor in weights.values():
        if tensor.shape == head_VH.shape and torch.equal(tensor, head_VH.to(tensor.dtype)):
            tensor.view(-1)[tensor.abs().argmax()] *= 1 + _APART
    return weights


def _notes(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a cycle that are added to each of its rows of metrics."""
    own = figures["decode_acceptance_length"]
    return {
        "cycle": figures["cycle"],
        "serving_version": figures["draft_version"],
        "serving_acceptance_length": figures.get(f"{HELD_OUT}_acceptance_length", own),
        "decode_acceptance_length": own,
    }


def _check_depths(decoded: Pass, spec: RunSpec) -> None:
    """Raise ConfigError if the run needs guess depths and the engine, as it is configured, reported none."""
    if spec.config.decode.on_policy and not all(answer.guess_depths for answer in decoded.answers):
        raise ConfigError(
            f"decode.on_policy=true: engine {spec.config.engine.name!r} did not say which guesses it judged; "
            "remove it, or the engine's arguments that change how guesses are verified"
        )


def _check_tokens(answers: Dataset, spec: RunSpec) -> None:
    """Raise ArtifactError if answers on disk contain token ids outside the target's vocabulary."""
    for sample in answers.samples:
        if sample.input_ids.max() >= spec.target.vocab_size:
            raise ArtifactError(
                f"{sample.where} is damaged: token {sample.input_ids.max()}, the target's vocabulary has "
                f"{spec.target.vocab_size}; delete that file, and its prompts are answered anew"
            )


def _prompt(prompt: Any) -> list[int]:
    return [int(token) for token in prompt]
