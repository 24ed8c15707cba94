"""Parts that ``colocated`` and ``disaggregated`` share: the trainer alone, the engine alone, a run of both.

Every phase is a process of its own; this one imports no torch and has nothing on the device.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands import end_by_exception, output_of
from measure import machine, versions
from random_target import SHAPES
from real_run import Run, measured, settings
from run_settings import SETTINGS, beside_goals, case_fields
from trainer_step import OPTIONAL_PACKAGES, PACKAGES, Case, Runner

from spec_core import Backend, Engine, plugins

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("end_to_end")

PHASES = ("trainer", "engine", "both")
CASE_FLAGS = ("draft", "tokens", "passes", "num_anchors", "num_steps", "draft_vocab_size", "dtype")
ENGINE_TOKENS = 48 * 2048
"""Tokens of one capture of the engine alone; at toy size those of two steps."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """Numbers of engine replicas, trainer ranks and devices, and how they are placed."""

    placement: str
    replicas: int
    ranks: int
    devices: int
    ideal: Callable[[float, float], float]
    """Ideal samples/s, given those of one engine replica and one trainer rank alone on a device."""
    target_parallel: int = 1
    """Devices over which one engine replica spreads."""
    draft_parallel: int = 1
    """Trainer ranks that divide one draft by tensors."""


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of what both benchmarks have in common."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = found.add_mutually_exclusive_group(required=True)
    target.add_argument("--toy", action="store_true", help="a tiny target and few steps: seconds on a CPU")
    target.add_argument("--shape", choices=sorted(SHAPES), help="of the target")
    found.add_argument("--backend", default="cpu")
    found.add_argument("--engine", default="hf")
    found.add_argument("--setting", choices=sorted(SETTINGS), help="default: the draft's")
    found.add_argument("--samples-per-step", type=int, help="of one trainer rank, over all passes")
    for name in CASE_FLAGS:
        kind = str if name in ("draft", "dtype") else int
        found.add_argument(f"--{name.replace('_', '-')}", type=kind)
    found.add_argument("--steps", type=int, help="of the optimizer; default 100")
    found.add_argument("--warm-up", type=int, help="of these, before the timed ones; default 20")
    found.add_argument("--cool-down", type=int, help="of these, after the timed ones; default 10")
    found.add_argument("--profile-step", type=int, help="traces this step (from 0), one of the warm-up")
    found.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    found.add_argument("--target", type=Path, help="folder to use, or to write the random target to")
    found.add_argument("--output", type=Path, help="new folder that keeps the run, its data and all logs")
    found.add_argument("--limit-s", type=float, default=1800.0, help="for each phase")
    found.add_argument("words", nargs="*", help="of the run: -- placement.engine_fraction=0.5 …")
    return found


def main(found: argparse.ArgumentParser, place: Callable[[argparse.Namespace], Place]) -> int:
    """Measure the phases that the command line asks for and print the document; return the exit code."""
    options = found.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_by_exception()
    with ExitStack() as stack:
        scratch = options.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        if any(scratch.iterdir()):
            found.error(f"--output {scratch} is not empty")
        where = place(options)
        if options.phases != ["both"] and max(where.target_parallel, where.draft_parallel) > 1:
            found.error("trainer and engine alone have one device each: add --phases both")
        run = _run(found, options, where, scratch)
        print(json.dumps(_document(options, run, where), indent=2, default=str))
    return 0


def _run(found: argparse.ArgumentParser, options: argparse.Namespace, where: Place, scratch: Path) -> Run:
    toy = options.toy
    options.shape = options.shape or "toy"
    options.setting = options.setting or options.draft or "eagle3"
    run = Run(
        placement=where.placement,
        replicas=where.replicas,
        ranks=where.ranks,
        target_parallel=where.target_parallel,
        draft_parallel=where.draft_parallel,
        engine=options.engine,
        case=_case(found, options),
        steps=options.steps or (9 if toy else 100),
        warm_up=options.warm_up or (3 if toy else 20),
        cool_down=(1 if toy else 10) if options.cool_down is None else options.cool_down,
        profile_step=options.profile_step,
        words=tuple(options.words),
        target=(options.target or scratch / "target").absolute(),
        folder=scratch.absolute(),
        limit_s=options.limit_s,
    )
    _check(found, run)
    return run


def _case(found: argparse.ArgumentParser, options: argparse.Namespace) -> Case:
    given = {name: getattr(options, name) for name in CASE_FLAGS}
    fields = case_fields(options.setting, options.shape) | {
        name: value for name, value in given.items() if value is not None
    }
    if options.samples_per_step is not None:
        fields["sequences"], left = divmod(options.samples_per_step, fields.get("passes", 1))
        if left or not fields["sequences"]:
            found.error(
                f"--samples-per-step {options.samples_per_step} does not divide into {fields['passes']} passes"
            )
    return Case(**fields, backend=options.backend)


def _check(found: argparse.ArgumentParser, run: Run) -> None:
    """Refuse settings that would make the phases differ, or the times mean something else."""
    fixed = settings(run, Path())
    for word in run.words:
        key = word.partition("=")[0]
        if key in fixed or key.startswith("draft."):
            found.error(f"{word}: this benchmark sets {key} itself, for all phases; see --help")
    if run.steps < run.warm_up + run.cool_down + 2:
        found.error(
            f"--steps {run.steps}: at least two between --warm-up {run.warm_up} and --cool-down {run.cool_down}"
        )
    if run.profile_step is not None and not 0 <= run.profile_step < run.warm_up:
        found.error(f"--profile-step {run.profile_step} is not one of --warm-up {run.warm_up} steps")


def _document(options: argparse.Namespace, run: Run, where: Place) -> dict[str, Any]:
    backend = plugins.load_available(Backend, run.case.backend)
    engine = plugins.load_available(Engine, run.engine)
    document: dict[str, Any] = {
        "benchmark": run.placement,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(*PACKAGES, *OPTIONAL_PACKAGES)
        | engine.probe().versions
        | backend.probe().versions,
        "settings": {
            "setting": options.setting,
            "shape": options.shape,
            "engine": run.engine,
            "engine_replicas": run.replicas,
            "trainer_ranks": run.ranks,
            "target_parallel": run.target_parallel,
            "draft_parallel": run.draft_parallel,
            "devices": where.devices,
            "samples_per_step": run.samples_per_step,
            "steps": run.steps,
            "warm_up": run.warm_up,
            "cool_down": run.cool_down,
            "words": run.words,
            "case": asdict(run.case),
        },
    }
    phases = {"trainer": _trainer_alone, "engine": _engine_alone, "both": _both}
    _write_target(run, options.shape)
    for name in [name for name in PHASES if name in options.phases]:
        log.info("phase %s", name)
        document[name] = phases[name](run, options.shape)
        figures = {key: value for key, value in document[name].items() if isinstance(value, float)}
        log.info("phase %s: %s", name, ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    return document | _compared(document, where, options)


def _write_target(run: Run, shape: str) -> None:
    """Write the target in a process of its own, because that uses the device."""
    words = [shape, str(run.target), "--dtype", run.case.dtype]
    write = [sys.executable, str(HERE / "random_target.py"), *words]
    output_of(write, run.folder / "target.log", run.limit_s)


def _trainer_alone(run: Run, shape: str) -> dict[str, Any]:
    """Measure one rank's step with a device of its own."""
    return Runner()(run.case)


def _engine_alone(run: Run, shape: str) -> dict[str, Any]:
    """Measure one replica with a device of its own, and a process that takes and releases its samples."""
    case = run.case
    samples = 2 * run.samples_per_step if shape == "toy" else max(1, ENGINE_TOKENS // case.tokens)
    flags = {"engine": run.engine, "backend": case.backend, "placement": run.placement, "shape": shape}
    flags |= {"target": run.target, "dtype": case.dtype, "draft": case.draft}
    flags |= {"samples": samples, "tokens": case.tokens}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(HERE / "capture.py"), *words, "--only-capture", *run.engine_words()]
    found = json.loads(output_of(command, run.folder / "engine.log", run.limit_s))
    figures = {name: value for name, value in found.items() if name not in ("date", "machine", "versions")}
    return {"samples_per_s": found["capture_tokens_per_s"] / case.tokens, **figures}


def _both(run: Run, shape: str) -> dict[str, Any]:
    return measured(run)


def _compared(document: dict[str, Any], where: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Return figures per device, beside the ideal of the parts alone and beside the goals."""
    if "both" not in document:
        return {}
    names = ("samples_per_s", "tokens_per_s")
    per_device = {name: document["both"][name] / where.devices for name in names}
    found: dict[str, Any] = {"per_device": per_device}
    figures = per_device | {"data_wait_share": document["both"]["data_wait_share"]}
    if "trainer" in document and "engine" in document:
        alone = (document[phase]["samples_per_s"] for phase in ("engine", "trainer"))
        found["ideal_samples_per_s"] = ideal = where.ideal(*alone)
        found["efficiency"] = figures["efficiency"] = document["both"]["samples_per_s"] / ideal
    if options.shape != "toy":
        found |= beside_goals(options.setting, figures)
    return found
