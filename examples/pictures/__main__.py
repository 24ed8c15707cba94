"""Train drafts for a tiny target that sees, on a CPU, and measure them on pictures that no one has seen.

Run ``python examples/pictures --output FOLDER`` from the repository's root. A target that is there is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawing import scenes, write_rows
from target import TargetSize, build_target
from transformers import AutoTokenizer

from spec_core.records import SamplingParams
from spec_kit.targets import read_target
from spec_trainer.base.disk import write_atomically
from spec_trainer.cli.app import run
from spec_trainer.cli.commands.evaluate import evaluate_draft
from spec_trainer.cli.quickstart.baselines import BigramModel, BigramProposer
from spec_trainer.configuration.engine_options import read_engine_options
from spec_trainer.data.prompts import load_prompts
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.plan.images import prompt_image_rules
from spec_trainer.training.wiring import create_engine
from spec_trainer.workers.passes import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_DRAFT_TOKENS = 3
NEW_TOKENS = 24
WITH, WITHOUT, UNTRAINED, BIGRAM = "with pictures", "without pictures", "untrained", "bigram"
DRAFT = (
    "draft.name=eagle3",
    f"draft.num_steps={NUM_DRAFT_TOKENS}",
    "draft.step_decay=1.0",
    "draft.layers=[1,2,3]",
    "data.eval_samples=0",
    "data.max_length=256",
)
TRAINING = (
    "train.lr=7e-3",
    "train.global_batch_tokens=512",
    "train.warmup_steps=20",
    "optimizer.betas=[0.8,0.95]",
    "optimizer.name=muon",
    "optimizer.matrix_rate=2.857",
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """The files of the example, and its sizes."""

    folder: Path
    num_rows: int
    num_prompts: int
    draft_steps: int
    target_size: TargetSize

    @property
    def target(self) -> Path:
        """Folder of the tiny target."""
        return self.folder / "target"

    @property
    def held_out(self) -> Path:
        """File of the held-out rows."""
        return self.folder / "held-out.jsonl"

    def features(self, name: str) -> Path:
        """Folder of the target's features of the training rows with or without pictures."""
        return self.folder / f"features-{name.replace(' ', '-')}"


def main(arguments: Sequence[str]) -> int:
    """Make what is missing, measure the drafts of all seeds, and print the table."""
    options = _options(arguments)
    example = Example(
        folder=options.output,
        num_rows=options.rows,
        num_prompts=options.prompts,
        draft_steps=options.steps,
        target_size=TargetSize(steps=options.target_steps),
    )
    right = _make_target(example)
    _capture_rows(example)
    bigram = _bigram_length(example)
    seeds = []
    for seed in range(options.seeds):
        seeds.append({"seed": seed, **_measured(example, seed), BIGRAM: bigram})
        print(_line(str(seed), seeds[-1]), flush=True)
    document = _document(right, seeds, options)
    write_atomically(example.folder / "figures.json", json.dumps(document, indent=2) + "\n")
    print("\n".join(_table(document)))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python examples/pictures", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("pictures"), help="folder for all files")
    parser.add_argument("--seeds", type=int, default=2, help="drafts of each kind; five for docs/targets.md")
    parser.add_argument("--rows", type=int, default=300, help="training rows of the drafts")
    parser.add_argument("--prompts", type=int, default=32, help="held-out rows")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps of a draft")
    parser.add_argument("--target-steps", type=int, default=TargetSize.steps)
    return parser.parse_args(arguments)


def _make_target(example: Example) -> float:
    """Train the target unless it is there; return the share of captions that it gets wholly right."""
    note = example.folder / "target.json"
    if not note.exists():
        right = build_target(example.target, example.target_size)
        write_atomically(note, json.dumps({"captions_right": right}) + "\n")
    return json.loads(note.read_text())["captions_right"]


def _capture_rows(example: Example) -> None:
    """Write the rows, and capture the target's features of those to train on."""
    files = write_rows(example.folder, "train", scenes(example.num_rows, seed=1))
    write_rows(example.folder, "held-out", scenes(example.num_prompts, seed=2))
    for name, rows in zip((WITH, WITHOUT), files, strict=True):
        _call(
            "capture",
            *_inputs(example, rows),
            *("--output", str(example.features(name))),
            *DRAFT,
        )


def _inputs(example: Example, rows: Path) -> tuple[str, ...]:
    return (
        *("--target", str(example.target), "--data", str(rows)),
        f"data.media_root={example.folder}",
    )


def _call(*words: str) -> None:
    code = run(words)
    if code:
        raise SystemExit(code)


def _measured(example: Example, seed: int) -> dict[str, Any]:
    """Return the acceptance lengths of the drafts of one seed on the held-out pictures."""
    found: dict[str, Any] = {}
    for name in (WITH, WITHOUT, UNTRAINED):
        document = _evaluated(example, _trained(example, name, seed), seed)
        found[name] = document["inputs"]["images"]["acceptance_length"]
        found[f"outputs_equal, {name}"] = document["outputs_equal"]
    return found


def _trained(example: Example, name: str, seed: int) -> Path:
    """Return the folder of a draft, trained if it is not there; one step of no length leaves it untrained."""
    output = example.folder / f"draft-{name.replace(' ', '-')}-{seed}"
    features, rows = (WITHOUT, "train-without-pictures") if name == WITHOUT else (WITH, "train")
    steps = (f"train.steps={example.draft_steps}",)
    if name == UNTRAINED:
        steps = ("train.steps=1", "train.lr=1e-30")
    _call(
        "train",
        *_inputs(example, example.folder / f"{rows}.jsonl"),
        *("--output", str(output), f"seed={seed}", f"data.features={example.features(features)}"),
        *(*DRAFT, *TRAINING, *steps),
    )
    return output / "draft"


def _evaluated(example: Example, draft: Path, seed: int) -> dict[str, Any]:
    request = EvaluationRequest(
        target=str(example.target),
        draft_model=draft,
        prompts=example.held_out,
        num_draft_tokens=str(NUM_DRAFT_TOKENS),
        max_new_tokens=NEW_TOKENS,
        temperature=0.0,
        untrained=False,
        seed=seed,
    )
    return evaluate_draft(request, (f"data.media_root={example.folder}",))


def _bigram_length(example: Example) -> float:
    """Return the acceptance length of a bigram model of the training rows, decoded by the same code."""
    target = read_target(example.target)
    tokenizer = AutoTokenizer.from_pretrained(example.target)
    rows = (example.folder / "train-without-pictures.jsonl").read_text().splitlines()
    texts = [tokenizer.apply_chat_template(json.loads(row)["messages"], tokenize=False) for row in rows]
    bigram = BigramModel((tokenizer(text)["input_ids"] for text in texts), target.vocab_size)
    options = read_engine_options("hf", "cpu", (f"data.media_root={example.folder}",))
    images = prompt_image_rules(options.engine_type, target)
    prompts = load_prompts(
        example.held_out, target.folder, target.vocab_size, 256, options.config.data, images
    )
    sampling = SamplingParams(
        max_new_tokens=NEW_TOKENS, temperature=0.0, num_draft_tokens=NUM_DRAFT_TOKENS, with_margins=False
    )
    with create_engine(options, target) as engine:
        engine.use_proposer(lambda: BigramProposer(bigram))
        return decode(engine, prompts, sampling).counters.acceptance_length


def _document(right: float, seeds: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    names = ("torch", "transformers", "pillow", "spec-trainer", "spec-engine-hf", "spec-draft-eagle3")
    return {
        "example": "pictures",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"CPU, cores: {len(os.sched_getaffinity(0))}",
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in names},
        "target": "Qwen3-VL of random weights, trained on the pictures",
        "captions_right": right,
        **{name: value for name, value in vars(options).items() if name != "output"},
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "acceptance_length": seeds,
        "mean": {
            name: statistics.fmean(row[name] for row in seeds) for name in (WITH, WITHOUT, UNTRAINED, BIGRAM)
        },
    }


def _line(name: str, row: dict[str, Any]) -> str:
    return f"{name:<6}" + "".join(f"{row[key]:>18.2f}" for key in (WITH, WITHOUT, UNTRAINED, BIGRAM))


def _table(document: dict[str, Any]) -> list[str]:
    return [
        "",
        f"The target describes {100 * document['captions_right']:.0f} % of the held-out pictures without a mistake.",
        f"Acceptance length (tau) on {document['prompts']} held-out pictures, {NUM_DRAFT_TOKENS} draft tokens:",
        f"{'seed':<6}" + "".join(f"{key:>18}" for key in (WITH, WITHOUT, UNTRAINED, BIGRAM)),
        *(_line(str(row["seed"]), row) for row in document["acceptance_length"]),
        _line("mean", document["mean"]),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
