"""Absurd numbers under every key of a configuration: ``plan`` ends in one line, in bounded memory and time."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pydantic

NUMBERS = [
    "100000000", "1000000000000000000", "-1", "0", "1e308", ".nan", ".inf", "2147483648", "1" + "0" * 400,
]  # fmt: skip
_DRAFTS = ["eagle3", "dflash"]


def absurd_number(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """One key has such a number; lists have a few of them, or one."""
    draft = draw.choice(_DRAFTS)
    key, number = draw.choice(list(keys(draft))), draw.choice(NUMBERS)
    value = draw.choice([number, number, f"[{number}]"])
    data = root / draw.choice(["tokens.jsonl", "rows.jsonl"])
    words = ["--target", root / "target", "--data", data, "--output", folder / "out"]
    return f"{draft}: {key}={value[:30]}", ["plan", *words, f"draft.name={draft}", f"{key}={value}"]


def keys(draft: str) -> Iterator[str]:
    """Yield every key of a configuration that names this draft."""
    from spec_core import Draft, plugins
    from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS
    from spec_trainer.configuration.run import SECTIONS, run_config_type

    types: dict[str, Any] = {
        kind: plugins.load(interface, DEFAULT_PLUGINS[kind]).Config for kind, interface in SECTIONS.items()
    }
    yield from _keys(run_config_type(**types | {"draft": plugins.load(Draft, draft).Config}))


def _keys(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = next(
            (kind for kind in (field.annotation, *get_args(field.annotation)) if _is_model(kind)), None
        )
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from _keys(inner, f"{prefix}{name}.")


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
