"""Draw pictures of four coloured shapes, and write rows that describe them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CELL = 16
"""Pixels of a side of the square in which a shape is drawn; a picture has two rows of two."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
    "white": (245, 245, 245),
    "purple": (150, 50, 180),
}
SHAPES = ("square", "circle", "triangle", "cross", "ring", "bar")
QUESTION = "What is in the picture?"


@dataclass(frozen=True)
class Scene:
    """Four coloured shapes, in reading order, and a seed for their sizes and places."""

    things: tuple[tuple[str, str], ...]
    seed: int

    @property
    def caption(self) -> str:
        """A sentence that names the shapes of a picture of the scene."""
        first, second, third, last = (f"a {colour} {shape}" for colour, shape in self.things)
        return f"{first}, {second}, {third} and {last}."

    def drawn(self) -> Image.Image:
        """Return a picture of the scene, always the same one."""
        draw = random.Random(self.seed)
        image = Image.new("RGB", (2 * CELL, 2 * CELL), (draw.randrange(60),) * 3)
        for place, (colour, shape) in enumerate(self.things):
            size = draw.randint(9, 13)
            left = place % 2 * CELL + draw.randint(1, CELL - 1 - size)
            top = place // 2 * CELL + draw.randint(1, CELL - 1 - size)
            shade = tuple(max(0, value - draw.randrange(25)) for value in COLOURS[colour])
            _draw_shape(ImageDraw.Draw(image), shape, (left, top, left + size, top + size), shade)
        return image


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: tuple[int, ...]
) -> None:
    left, top, right, bottom = box
    across, down = (left + right) // 2, (top + bottom) // 2
    if shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(across, top), (left, bottom), (right, bottom)], fill=colour)
    elif shape == "cross":
        pen.line((left, top, right, bottom), fill=colour, width=3)
        pen.line((left, bottom, right, top), fill=colour, width=3)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=2)
    else:
        pen.rectangle((left, down - 1, right, down + 1), fill=colour)


def scenes(number: int, seed: int) -> list[Scene]:
    """Return random scenes; another seed gives others."""
    draw = random.Random(seed)
    return [
        Scene(
            tuple((draw.choice(list(COLOURS)), draw.choice(SHAPES)) for _ in range(4)), draw.randrange(2**32)
        )
        for _ in range(number)
    ]


def write_rows(folder: Path, name: str, shown: Sequence[Scene]) -> tuple[Path, Path]:
    """Write the scenes' pictures and two files of rows: with the pictures, and the same rows without them."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows, blind = [], []
    for number, scene in enumerate(shown):
        file = f"{name}/{number:05}.png"
        scene.drawn().save(folder / file)
        image = {"type": "image_url", "image_url": {"url": file}}
        text = {"type": "text", "text": QUESTION}
        rows.append(_row([image, text], scene))
        blind.append(_row([text], scene))
    files = folder / f"{name}.jsonl", folder / f"{name}-without-pictures.jsonl"
    for path, written in zip(files, (rows, blind), strict=True):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in written))
    return files


def _row(content: list[dict[str, Any]], scene: Scene) -> dict[str, Any]:
    answer = {"role": "assistant", "content": scene.caption}
    return {"messages": [{"role": "user", "content": content}, answer]}
