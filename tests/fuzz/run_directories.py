"""Run directories from elsewhere: damaged, forged with fitting digests, linked; then resumed or exported."""

import json
import random
import shutil
from html.parser import HTMLParser
from pathlib import Path

from . import damage, material, special_files

MARKUP = "<img src=x onerror=alert(1)>'\"<script>"
_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
_LARGEST_BYTES = 1 << 24
"""Size of a file from which on no digest of it is written."""


def run_directory(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object], Path]:
    """Return a name of the damage, the words of a command that reads it, and the folder that it may change."""
    kind = draw.choice(["run", "run", "cycles"])
    run = material.copy(root, kind, folder)
    (folder / "elsewhere" / ".step-1").mkdir(parents=True)
    (folder / "elsewhere" / ".precious").write_text("x")
    steps = sorted((run / "checkpoints").glob("step-*"))
    file = draw.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".identity"))
    how = draw.choice([_forge, _forge, _forge, _damage, _special, _link, _bomb, _swap])
    what = how(run, file, draw)
    for step in steps:
        if draw.random() < 0.9:
            _seal(step)
    command = draw.choice(["resume", "resume", "go on", "export", "evaluate", "plan"])
    words = material.run_words(root, kind, run)
    if command == "export":
        words = ["export", "--checkpoint", draw.choice(steps), "--output", folder / "exported"]
    elif command == "evaluate":
        draft = ["--draft-model", run / "draft", "--prompts", root / "tokens.jsonl"]
        words = ["evaluate", "--target", root / "target", *draft, "--max-new-tokens", 1, "--no-untrained"]
    elif command == "go on":
        words += ["train.steps=6"]
    elif command == "plan":
        words = ["plan", *words]
    changes = {"export": folder / "exported", "resume": run, "go on": run}
    return f"{command}: {kind}: {what}", words, changes.get(command, folder / "nothing")


def page_problems(root: Path, run: Path) -> list[str]:
    """Whether the page of a run holds an element or an attribute that the clean one has not."""
    page = run / "report.html"
    if not page.is_file() or page.is_symlink():
        return []
    found = _Elements(page.read_text()).names - _Elements((root / run.name / "report.html").read_text()).names
    return [f"markup in report.html: {sorted(found)[0]}"] if found else []


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[tuple[str, ...]] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add((tag, *sorted(name for name, _ in attrs)))


def _forge(run: Path, file: Path, draw: random.Random) -> str:
    """A value of a JSON file, a row, a header, or a line of YAML becomes another, or markup."""
    texts = [path for path in run.rglob("*.json*") if path.is_file()]
    file = draw.choice(sorted([*texts, *texts, *run.rglob("*.safetensors"), *run.rglob("config.yaml")]))
    if draw.random() < 0.3 and file.suffix.startswith(".json"):
        text = file.read_text()
        document = (
            [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)
        )
        place, key = draw.choice(list(damage.places(document)))
        place[key] = MARKUP
        lines = (
            [json.dumps(row) + "\n" for row in document]
            if file.suffix == ".jsonl"
            else [json.dumps(document)]
        )
        file.write_text("".join(lines))
        return f"{file.relative_to(run)}: markup for {key}"
    structured = {
        ".jsonl": damage.damage_rows,
        ".json": damage.damage_json_file,
        ".safetensors": damage.damage_header,
    }
    if file.suffix not in structured:
        lines = file.read_text().splitlines()
        lines[draw.randrange(len(lines))] = draw.choice(
            ["x: [", "draft: {name: 5}", "seed: -1", "? ", "target: [1]"]
        )
        file.write_text("\n".join(lines))
        return f"{file.relative_to(run)}: a line"
    return f"{file.relative_to(run)}: {structured[file.suffix](file, draw)}"


def _damage(run: Path, file: Path, draw: random.Random) -> str:
    return f"{file.relative_to(run)}: {damage.damage_bytes(file, draw)}"


def _special(run: Path, file: Path, draw: random.Random) -> str:
    return special_files.put(
        draw.choice([file, run / ".lock", run / ".identity", run / "logs" / "x.jsonl"]), draw
    )


def _link(run: Path, file: Path, draw: random.Random) -> str:
    """A file or a folder is a link to one elsewhere that is like it, or to one with entries of somebody's."""
    place = draw.choice(
        [file, file.parent if file.parent != run else file, run / "checkpoints", run / "logs"]
    )
    elsewhere = run.parent / "elsewhere"
    if place.is_dir() and draw.random() < 0.5:
        shutil.rmtree(place)
        place.symlink_to(elsewhere)
    else:
        shutil.move(place, elsewhere / "like")
        place.symlink_to(elsewhere / "like")
    return f"{place.relative_to(run)}: a link"


def _bomb(run: Path, file: Path, draw: random.Random) -> str:
    config = draw.choice(sorted(run.rglob("config.yaml")))
    config.write_text(_BOMB + config.read_text())
    return f"{config.relative_to(run)}: aliases of aliases"


def _swap(run: Path, file: Path, draw: random.Random) -> str:
    """A file of a checkpoint, or the configuration, is that of another step, or of another run."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name in ("config.yaml", "meta.json")]
    one, other = draw.sample(sorted(files), 2)
    text = other.read_text()
    if other.name == one.name == "config.yaml":
        old, new = draw.choice(
            [("seed: 0", "seed: 1"), ("layers:", "num_layers: 2\n  layers:"), ("eagle3", "dflash")]
        )
        text = text.replace(old, new)
    one.write_text(text)
    return f"{one.relative_to(run)} is {other.relative_to(run)}"


def _seal(step: Path) -> None:
    """Write digests into meta.json that fit what the folder holds, vast files apart, where it is still a folder."""
    from spec_kit.sharding.safetensors_folder import new_digest

    meta = step / "meta.json"
    try:
        body = json.loads(meta.read_text())
        body.pop("checksum", None)
        body["files"] = {
            name: new_digest((step / name).read_bytes()).hexdigest()
            for name in body["files"]
            if (step / name).is_file() and (step / name).stat().st_size < _LARGEST_BYTES
        }
        if (step / "state").is_symlink() or step.is_symlink() or step.parent.is_symlink():
            return
        checksum = new_digest(json.dumps(body).encode()).hexdigest()
        meta.write_text(json.dumps({**body, "checksum": checksum}, indent=2) + "\n")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
