"""Cases in which a command is to write into something special: a device, a pipe, a link, the file that it reads."""

import os
import random
from pathlib import Path

from . import material

_PLACES = ["/proc/fuzz", "/proc/self/fuzz", "/sys/fuzz", "/dev/null", "/dev/null/fuzz", "/dev/full", "."]


def output(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object], Path]:
    """Draw a command and where it is to write; what is there may not change, but for a file without a name yet."""
    command = draw.choice(["export", "convert", "plan", "evaluate", "evaluate", "evaluate", "regenerate"])
    place, what = _place(root, folder, draw)
    if command == "regenerate":
        place = place if os.path.lexists(place) else f"{place}.jsonl"
    words = {
        "export": ["--checkpoint", root / "run" / "checkpoints" / "step-4", "--output", place],
        "convert": ["--draft-model", root / "eagle3", "--target", root / "target", "--output", place],
        "plan": ["--target", root / "target", "--data", root / "tokens.jsonl", "--output", place],
        "regenerate": ["--target", root / "target", "--data", root / "rows.jsonl", "--max-new-tokens", 1],
        "evaluate": [
            "--target", root / "target", "--draft-model", root / "eagle3", "--prompts", folder / "tokens.jsonl",
            "--max-new-tokens", 1, "--temperature", 0, "--no-untrained", "--report", place,
        ],
    }  # fmt: skip
    if command == "regenerate":
        words[command] += ["--output", place]
    return f"{command} into {what}", [command, *words[command]], folder / "new"


def _place(root: Path, folder: Path, draw: random.Random) -> tuple[object, str]:
    prompts, place = material.copy(root, "tokens.jsonl", folder), folder / "place.jsonl"
    how = draw.choice(
        ["new", "pipe", "null", "link", "lost", "loop", "prompts", "text", "folder", "far", "long"]
    )
    if how == "new":
        return folder / "new" / "x.jsonl", how
    if how == "far":
        far = draw.choice(_PLACES)
        return far, far
    if how == "prompts":
        return prompts, how
    if how == "pipe":
        os.mkfifo(place)
    elif how == "null":
        place.symlink_to("/dev/null")
    elif how == "text":
        place.write_text("mine\n")
    elif how == "folder":
        place.mkdir()
    elif how == "long":
        place = folder / ("x" * 300)
    else:
        place.symlink_to({"link": prompts, "lost": folder / "gone", "loop": place}[how])
    return place, how
