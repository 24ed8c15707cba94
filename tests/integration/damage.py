"""Damages files of a run directory between two commands, and knows what the next command must say of that."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec_trainer.checkpoint.folder import finished

if TYPE_CHECKING:
    import random
    from pathlib import Path

WHOLE = 3
"""Whole checkpoints of which the newest one may be damaged: after two of them are swapped one is left."""
OTHERS = 0.4
"""How often ``best`` is damaged, and how often a record, beside a checkpoint."""
_RECORD_MARKS = b'{}\n"'
"""Bytes of a record whose change leaves no row; that of a digit leaves one, and nobody promises to notice it."""


@dataclass(frozen=True)
class Damage:
    """One fault between two commands."""

    name: str
    place: str
    """Part of the file's path that the next command names; empty where it writes the file anew and says nothing."""
    refused: bool = False
    """Whether the next command ends with exit code 2."""


@dataclass
class RunFiles:
    """The run directory as somebody sees it who damages it."""

    output: Path
    draw: random.Random
    aside: Path
    """Folder that links lead to."""
    _damaged: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Damaged checkpoint -> what it was; another one is there once the run has written it anew."""
    _rows: dict[Path, dict[int, str]] = field(default_factory=dict)
    """Record -> step -> the row, of records before they were damaged."""

    def whole(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        folders = finished(self.output / "checkpoints")
        return [folder for folder in folders if self._damaged.get(folder) != _version_of(folder)]

    def resume_from(self) -> str:
        """Some word that leads past damaged checkpoints; "latest" if the newest is whole."""
        whole = self.whole()
        folders = finished(self.output / "checkpoints")
        if not folders or folders[-1] in whole:
            return "latest"
        return self.draw.choice(["previous", whole[-1].name])

    def step_of(self, resume_from: str) -> int:
        """Steps that are done where a command resumes from there."""
        folders = self.whole()
        if resume_from == "previous":
            folders = [folder for folder in folders if folder != finished(folder.parent)[-1]]
        name = folders[-1].name if resume_from in ("latest", "previous") and folders else resume_from
        return int(name.removeprefix("step-")) if name.startswith("step-") else 0

    def damage(self) -> list[Damage]:
        """One to three faults: of the newest checkpoint where others are whole, of ``best`` and of a record."""
        found: list[Damage] = []
        if len(self.whole()) >= WHOLE and self.resume_from() == "latest":
            found.append(self._damage_checkpoint())
        if self.draw.random() < OTHERS and (best := self.output / "checkpoints" / "best").is_symlink():
            found.append(self._damage_best(best))
        if not found or self.draw.random() < OTHERS:
            found.append(self._damage_record())
        return found

    def damage_products(self) -> list[Damage]:
        """Damage everything that a finished run writes anew when it is asked for again."""
        output, how = self.output, self.draw.choice(["empty", "truncate"])  # links are refused
        for file in (output / "summary.json", output / "report.html", output / "config.yaml"):
            _change(how, file, self.draw, self._elsewhere())
        shutil.move(output / "draft", self._elsewhere())
        (output / "draft").symlink_to(self.aside / "nowhere")
        names = ("summary.json", "report.html", "config.yaml")
        return [*(Damage(f"{how} {name}", "") for name in names), Damage("link draft", "")]

    def mend_records(self) -> None:
        """Put the rows back that damaged records have lost; all others are the run's."""
        for file, before in self._rows.items():
            rows = dict(_rows_of(file))
            if lost := self._lost(file):
                rows |= {step: before[step] for step in lost}
                file.write_text("".join(rows[step] for step in sorted(rows)))

    def _damage_checkpoint(self) -> Damage:
        *_, before, newest = self.whole()
        files = sorted(file for file in newest.rglob("*") if file.is_file())
        how = self.draw.choice(["flip", "truncate", "empty", "swap", "link", "swap folders", "link folder"])
        place = newest.name
        if how == "swap folders":
            _swap(newest, before)
            self._damaged[before] = _version_of(before)
        elif how == "link folder":
            shutil.move(newest, self._elsewhere())
            newest.symlink_to(before)
        else:
            others = [file for file in files if not _equal(file, before / file.relative_to(newest))]
            file = self.draw.choice(others if how in ("swap", "link") else files)
            place = str(file.relative_to(newest.parent))
            other = before / file.relative_to(newest)
            if how == "swap":  # with another file of the same folder: that before stays whole
                other = self.draw.choice([one for one in files if not _equal(file, one)])
                _swap(file, other)
                place = newest.name
            elif how == "link":
                file.unlink()
                file.symlink_to(other)
            else:
                _change(how, file, self.draw, self._elsewhere())
        self._damaged[newest] = _version_of(newest)
        return Damage(f"{how} {place}", newest.name, refused=True)

    def _damage_best(self, best: Path) -> Damage:
        how = self.draw.choice(["link", "folder", "empty"])
        if how == "folder" and (best / "meta.json").exists():
            copy = shutil.copytree(best, self._elsewhere())
            best.unlink()
            shutil.move(copy, best)
            return Damage("copy best", "")
        best.unlink()
        if how == "empty":
            best.mkdir()
        else:
            best.symlink_to(self.aside / "nowhere")
        return Damage(f"{how} best", "best")

    def _damage_record(self) -> Damage:
        logs = self.output / "logs"
        records = [self.output / "metrics.jsonl", *sorted(logs.glob("trained-*.jsonl"))]
        file = self.draw.choice(records)
        how = self.draw.choice(["flip", "truncate", "empty", "swap"])
        touched = records[:2] if how == "swap" else [file]
        for one in touched:
            self._rows[one] = {**self._rows.get(one, {}), **dict(_rows_of(one))}
        if how == "swap":
            _swap(*touched)
        elif how == "flip":
            content = bytearray(file.read_bytes())
            marks = [place for place, byte in enumerate(content) if byte in _RECORD_MARKS]
            content[self.draw.choice(marks)] = ord("#")
            file.write_bytes(content)
        else:
            _change(how, file, self.draw, self._elsewhere())
        done = self.step_of(self.resume_from())
        lost = [one for one in touched if any(step <= done for step in self._lost(one))]
        place = lost[0].name.partition("-")[0] if lost else ""  # all ranks' records are told of as one
        return Damage(f"{how} {' '.join(one.name for one in touched)}", place)

    def _lost(self, file: Path) -> set[int]:
        return self._rows[file].keys() - dict(_rows_of(file)).keys()

    def _elsewhere(self) -> Path:
        self.aside.mkdir(exist_ok=True)
        return self.aside / f"{self.draw.getrandbits(64):x}"


def _change(how: str, file: Path, draw: random.Random, elsewhere: Path) -> None:
    """Flip a bit of a file, cut it, empty it, or put a link to nothing in its place."""
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    elif how == "truncate":
        file.write_bytes(content[: draw.randrange(1, len(content))])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.symlink_to(elsewhere)


def _swap(one: Path, other: Path) -> None:
    scratch = one.with_name("swapped")
    one.rename(scratch)
    other.rename(one)
    scratch.rename(other)


def _equal(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def _version_of(folder: Path) -> tuple[int, int]:
    status = folder.lstat()
    return status.st_ino, status.st_mtime_ns


def _rows_of(file: Path) -> list[tuple[int, str]]:
    """Return step and line of each row that is one of such a file."""
    rows: list[tuple[int, str]] = []
    for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
        with suppress(ValueError):
            row = json.loads(line)
            if line.endswith("\n") and ("loss" in row) == (file.name == "metrics.jsonl"):
                rows.append((row["step"], line))
    return rows
