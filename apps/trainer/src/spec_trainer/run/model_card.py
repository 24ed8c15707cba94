"""Write the model card of a draft: README.md in its folder, which engines ignore and the Hugging Face hub shows.

Equal drafts get equal cards: a card has no date, and no path of this machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from spec_core import Draft, TargetSpec
from spec_core.errors import ArtifactError
from spec_core.foreign import read_bytes
from spec_kit.targets import hub_name
from spec_trainer.base.disk import check_own, write_atomically
from spec_trainer.configuration.run import AnyRunConfig
from spec_trainer.run.records import CardFigures, read_figures
from spec_trainer.run.serving import serving_commands

CARD = "README.md"
_CARD_BYTES = 1 << 22
_OF_TRAIN = (
    "epochs", "lr", "schedule", "warmup_steps", "decay_share", "min_lr_ratio", "clip", "dtype", "fp8",
    "global_batch_tokens",
)  # fmt: skip
"""Keys of section ``train`` that a card lists; the others say how and where the run went."""
_OF_DATA = ("max_length", "last_turn_only", "chat_template_kwargs")
_WHAT_IT_IS = (
    "A draft for speculative decoding: it guesses the next tokens of its target, which checks them in one pass. The "
    "text is the target's own; only the speed changes."
)


def write_card(
    folder: Path, draft: Draft, target: TargetSpec, num_draft_tokens: int, sections: Mapping[str, str]
) -> None:
    """Write the card of the draft in ``folder``. ``sections``: heading -> Markdown, after what every card has."""
    name = hub_name(target.folder)
    serve = _serve(folder, draft, target, num_draft_tokens, name or "TARGET")
    front = {
        **({} if name is None else {"base_model": name}),
        "library_name": "spec-trainer",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", draft.name, *sorted(serve)],
    }
    title = f"{draft.name} draft for {name or _plain(target.folder.resolve().name)}"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {title}",
        _WHAT_IT_IS,
        _table(("", ""), _facts(draft, target, num_draft_tokens)),
        *(f"## {heading}\n\n{body}" for heading, body in {**_serving(serve, name), **sections}.items()),
    ]
    write_atomically(folder / CARD, "\n\n".join(parts) + "\n")


def write_run_card(
    folder: Path,
    draft: Draft,
    target: TargetSpec,
    config: AnyRunConfig,
    figures: Mapping[str, Any],
    further: Mapping[str, str] | None = None,
) -> None:
    """Write the card of a draft that a run has trained.

    ``figures``: the run's summary, or a part of it. ``further``: more sections, heading -> Markdown.
    """
    number = (
        figures.get("served_draft_tokens") or config.decode.num_draft_tokens or draft.default_draft_tokens
    )
    sections = {"Training": _training(figures), "Settings": _settings(config), **(further or {})}
    write_card(folder, draft, target, number, sections)


def figures_of_run(summary: Path, steps: int) -> dict[str, Any]:
    """Return the figures of a finished run's ``summary.json``; none if it is damaged, or not of step ``steps``."""
    with suppress(ArtifactError):
        figures = read_figures(summary, CardFigures)
        if figures.get("steps") == steps:
            return figures
    return {}


def check_card(folder: Path) -> None:
    """Raise ArtifactError if a section cannot be added to the card in ``folder``."""
    check_own(folder / CARD)


def add_section(folder: Path, heading: str, body: str) -> None:
    """Replace the section of the card in ``folder``, or add it at the end."""
    check_card(folder)
    text = read_bytes(folder / CARD, ArtifactError, _CARD_BYTES).decode(errors="replace")
    section = f"## {heading}\n\n{body}\n"
    there = re.compile(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if there.search(text):
        text = there.sub(lambda found: section + ("\n" if found.end() < len(text) else ""), text, count=1)
    else:
        text = f"{text.rstrip()}\n\n{section}"
    write_atomically(folder / CARD, text)


def evaluation_section(document: Mapping[str, Any]) -> str:
    """Return the Markdown of section "Evaluation": figures of ``evaluate --json``."""
    versions = ", ".join(f"{name} {version}" for name, version in document["engine_versions"].items())
    head = f"Measured in engine {document['engine']}{f' ({versions})' if versions else ''} on {document['backend']}"
    passes = [one for one in (document["greedy"], document["sampled"]) if one is not None]
    rows = [_measured(f"all {document['prompts']}", one) for one in passes or [document]]
    rows += [_measured(f"{name}, {one['prompts']}", one) for name, one in document["benchmarks"].items()]
    heads = ("prompts", "temperature", "tokens a pass (τ)", "speed-up", "accepted by position")
    return f"{head}, {document['num_draft_tokens']} draft tokens per round.\n\n{_table(heads, rows)}"


def _measured(prompts: str, figures: Mapping[str, Any]) -> list[str]:
    return [
        prompts,
        f"{figures['temperature']:g}",
        f"{figures['acceptance_length']:.2f}",
        f"{figures['speedup']:.2f}",
        _shares(figures["acceptance_per_position"]),
    ]


def _facts(draft: Draft, target: TargetSpec, num_draft_tokens: int) -> Iterator[tuple[str, str]]:
    fields = draft.exported_config(target)
    yield "target", f"{target.architecture}, {target.num_layers} layers of width {target.hidden_size}"
    yield "kind", draft.name
    if isinstance(depth := fields.get("num_hidden_layers"), int):
        yield "layers", f"{depth}"
    if shapes := draft.cost(target).weight_shapes:
        yield "trained weights", f"{sum(map(math.prod, shapes.values())):,}"
    layers = ", ".join(map(str, draft.required_features(target).layers))
    yield "hidden states read in training", f"of layers {layers}"
    size = fields.get("draft_vocab_size")
    size = size if isinstance(size, int) else target.vocab_size
    yield "vocabulary", f"{size:,} of the target's {target.vocab_size:,} tokens"
    yield "draft tokens per round", f"{num_draft_tokens}"


def _training(figures: Mapping[str, Any]) -> str:
    """Return a table of the figures that a run's summary has."""
    rows: list[tuple[str, str]] = []
    counts = figures.get("samples", {})
    for title, value in (
        ("steps", figures.get("steps")),
        ("tokens trained", figures.get("tokens")),
        ("samples of the data", counts.get("kept")),
        ("held-out samples", counts.get("held_out")),
        ("tokens of the data", counts.get("tokens")),
        ("supervised tokens", counts.get("supervised_tokens")),
    ):
        if value is not None:
            rows.append((title, f"{value:,}"))
    for title, key in (
        ("tokens a pass (τ), measured", "acceptance_length"),
        ("tokens a pass (τ), in an engine's rounds of held-out answers", "eval_acceptance_length_rounds"),
        ("tokens a pass (τ), simulated on held-out data", "eval_acceptance_length"),
    ):
        if figures.get(key) is not None:
            rows.append((title, f"{figures[key]:.2f}"))
    for title, key in (
        ("accepted by position, measured", "acceptance_per_position"),
        ("accepted by position, in an engine's rounds of held-out answers", "eval_acceptance_per_position"),
        ("agreement after right guesses by position, simulated", "eval_accuracy"),
    ):
        if figures.get(key):
            rows.append((title, _shares(figures[key])))
    return _table(("figure", "value"), rows)


def _settings(config: AnyRunConfig) -> str:
    """Return the settings that decide what the draft learns, as YAML."""
    draft = config.draft.model_dump(mode="json", exclude_none=True)
    if config.draft.init_from is not None:
        draft["init_from"] = hub_name(config.draft.init_from) or config.draft.init_from.name
    train, data = config.train.model_dump(mode="json"), config.data.model_dump(mode="json")
    sections = {
        "seed": config.seed,
        "draft": draft,
        "optimizer": config.optimizer.model_dump(mode="json", exclude_none=True),
        "train": {key: train[key] for key in _OF_TRAIN if train[key] is not None},
        "data": {key: data[key] for key in _OF_DATA if data[key]},
        "engine": {"name": config.engine.name},
    }
    if config.decode.every:
        sections["decode"] = config.decode.model_dump(mode="json", exclude={"replicas"}, exclude_none=True)
    return f"```yaml\n{yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)}```"


def _serve(folder: Path, draft: Draft, target: TargetSpec, number: int, target_name: str) -> dict[str, str]:
    """Return engine -> serving command, with names in place of the folders of this machine."""
    # Absolute paths occur in nothing else of a command, as "draft" might.
    draft_folder = folder.absolute()
    target_folder = target.folder.absolute()
    names = {str(draft_folder): "DRAFT", str(target_folder): target_name}
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    place = re.compile(rf"({'|'.join(longest_first)})(?![\w-])")
    serve = serving_commands(replace(target, folder=target_folder), draft, draft_folder, number)
    return {engine: place.sub(lambda found: names[found[1]], command) for engine, command in serve.items()}


def _serving(serve: Mapping[str, str], name: str | None) -> dict[str, str]:
    if not serve:
        return {}
    both = "TARGET and DRAFT are the folders of the target and of this draft."
    commands = (f"With {engine}:\n\n```sh\n{command}\n```" for engine, command in serve.items())
    return {"Serving": "\n\n".join(["DRAFT is the folder of this draft." if name else both, *commands])}


def _shares(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(text: str) -> str:
    """Return a text without what Markdown would take for a mark."""
    return re.sub(r"([|`<>*\[\]\\])", r"\\\1", " ".join(text.split()))
