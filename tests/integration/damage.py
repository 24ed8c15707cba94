"""Damages files of a run directory between two commands, and knows what the next command must say of that."""

import json
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spec_trainer.training.checkpoint.folder import finished

WHOLE = 3
"""Whole checkpoints of which the newest one may be damaged: after two of them are swapped one is left."""
OTHERS = 0.4
"""How often ``best`` is damaged, and how often a record, beside a checkpoint."""
UNREAD = 0.2
"""How often a link takes the place of a file without rows instead of a record."""
LIVE = 0.5
"""How often a link leads to a file: to what was in its place."""
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
    link: Path | None = None
    """A link where the run keeps a file of its own: every command is refused until it is removed."""


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
        output, found = self.output, []
        for file in (output / "summary.json", output / "report.html", output / "config.yaml"):
            how = self.draw.choice(["empty", "truncate", "link"])
            found.append(Damage(f"{how} {file.name}", "", link=self._harm(how, file)))
        shutil.move(output / "draft", self._elsewhere())
        (output / "draft").symlink_to(self.aside / "nowhere")
        return [*found, Damage("link draft", "")]

    def contents_aside(self) -> dict[Path, bytes]:
        """Return the files outside the run directory to which links in it lead."""
        return {file: file.read_bytes() for file in self.aside.rglob("*") if file.is_file()}

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
                self._harm(how, file)
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
        if self.draw.random() < UNREAD:
            unread = self.draw.choice([self.output / "config.yaml", *sorted(logs.glob("*.log"))])
            return Damage(f"link {unread.name}", "", link=self._harm("link", unread))
        file = self.draw.choice(records)
        how, link = self.draw.choice(["flip", "truncate", "empty", "swap", "link"]), None
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
            link = self._harm(how, file)
        done = self.step_of(self.resume_from())
        lost = [one for one in touched if any(step <= done for step in self._lost(one))]
        place = lost[0].name.partition("-")[0] if lost else ""  # all ranks' records are told of as one
        return Damage(f"{how} {' '.join(one.name for one in touched)}", place, link=link)

    def _lost(self, file: Path) -> set[int]:
        return self._rows[file].keys() - dict(_rows_of(file)).keys()

    def _harm(self, how: str, file: Path) -> Path | None:
        """Flip a bit of a file, cut it or empty it; or return a link, to it or to nothing, that takes its place."""
        content = bytearray(file.read_bytes())
        if how == "flip":
            content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        elif how == "truncate":
            del content[self.draw.randrange(1, len(content)) :]
        elif how == "empty":
            content.clear()
        else:
            behind = self._elsewhere()
            file.rename(behind if self.draw.random() < LIVE else self._elsewhere())
            file.symlink_to(behind)
            return file
        file.write_bytes(content)
        return None

    def _elsewhere(self) -> Path:
        self.aside.mkdir(exist_ok=True)
        return self.aside / f"{self.draw.getrandbits(64):x}"


def _swap(one: Path, other: Path) -> None:
    scratch = one.with_name("swapped")
    one.rename(scratch)
    other.rename(one)
    scratch.rename(other)


def _is_own(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _equal(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def _version_of(folder: Path) -> tuple[int, int]:
    status = folder.lstat()
    return status.st_ino, status.st_mtime_ns


def _rows_of(file: Path) -> list[tuple[int, str]]:
    """Return step and line of each row that is one of such a file."""
    rows: list[tuple[int, str]] = []
    for line in file.read_text().splitlines(keepends=True) if _is_own(file) else ():
        with suppress(ValueError):
            row = json.loads(line)
            if line.endswith("\n") and ("loss" in row) == (file.name == "metrics.jsonl"):
                rows.append((row["step"], line))
    return rows
