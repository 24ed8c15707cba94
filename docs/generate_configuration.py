"""Prints docs/configuration.md from the configuration classes: ``python docs/generate_configuration.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from spec_core import Backend, Draft, Engine, plugins
from spec_trainer.config import run_config_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

HEAD = """\
# Configuration

Made by `docs/generate_configuration.py` from the classes that validate it. A run's configuration is a YAML file, the
command's flags, and `section.key=value` words; later wins, unknown keys are errors. Sections `backend`, `draft` and
`engine` are those of the plugins that they name; here: `cpu`, `eagle3`, `hf`.
"""


def main() -> None:
    model = run_config_type(
        plugins.load(Backend, "cpu").Config,
        plugins.load(Draft, "eagle3").Config,
        plugins.load(Engine, "hf").Config,
    )
    print(HEAD)
    print("| key | default | meaning |\n|---|---|---|")
    for key, field in _keys(model, ""):
        print(f"| `{key}` | {_default(field)} | {_one_line(field.description)} |")


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        nested: Any = field.annotation
        if hasattr(nested, "model_fields"):
            yield from _keys(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "" if field.default is None else f"`{field.default}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
