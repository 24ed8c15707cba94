"""Prints docs/configuration.md from the configuration classes: ``python docs/generate_configuration.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from spec_core import WeightTransport, plugins
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS
from spec_trainer.configuration.run import SECTIONS, run_config_type
from spec_trainer.configuration.track import track_config_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

HEAD = """\
# Configuration

`docs/generate_configuration.py` makes this page from the classes that validate it. A run's configuration is a YAML
file, the command's flags, and `section.key=value` words. Each overrides those before it, and unknown keys are errors.
Values are taken as written, and the environment is not read: write `target=$NAME` on the command line.
`section.key=null` sets no value; `section.key=` is refused. [data.md](data.md) lists the bounds of what is read.
The first table holds what every run has. Sections `backend`, `draft`, `optimizer`, `strategy`, `engine` and
`launcher` have further keys, of the plugins that they name; so has `push.options.NAME` of weight transports (and its
`bucket_bytes`, which comes before `push.bucket_bytes`). A key that several plugins of a section share comes first.
"""
COLUMNS, RULE = "| key | default | meaning |", "|---|---|---|"
HEADER = f"{COLUMNS}\n{RULE}"
OURS = "spec-"
"""How the names of this repository's distributions begin; plugins of third parties document themselves."""

COMPUTED = {"output": "`runs/NAME`"} | {
    f"{section}.name": f"`{name}`" for section, name in DEFAULT_PLUGINS.items()
}
"""Defaults that are not in a field, by key."""


def main() -> None:
    print(HEAD)
    _print_table(_keys(run_config_type(track=track_config_type()), ""))
    for section, interface in SECTIONS.items():
        names = [r.name for r in plugins.installed(interface) if r.distribution.startswith(OURS)]
        configs = {name: plugins.load(interface, name).Config for name in sorted(names)}
        _print_section(
            section, {name: _own_rows(section, config, interface.Config) for name, config in configs.items()}
        )
    for record in plugins.installed(WeightTransport):
        if record.distribution.startswith(OURS):
            section = f"push.options.{record.name}"
            config = plugins.load(WeightTransport, record.name).Config
            if rows := _own_rows(section, config, WeightTransport.Config):
                print(f"\n## `{section}`\n\n{HEADER}", *rows, sep="\n")


def _own_rows(section: str, config: type[BaseModel], base: type[BaseModel]) -> list[str]:
    """Return the rows of the keys that a plugin adds to the keys of its interface."""
    return [
        _row(key, field)
        for key, field in _keys(config, f"{section}.")
        if key.removeprefix(f"{section}.").split(".")[0] not in base.model_fields
    ]


def _print_section(section: str, rows_of: dict[str, list[str]]) -> None:
    """Print the rows that several plugins share, each once, and then those of each plugin."""
    owners: dict[str, list[str]] = {}
    for name, rows in rows_of.items():
        for row in rows:
            owners.setdefault(row, []).append(name)
    shared = {row: names for row, names in owners.items() if len(names) > 1}
    if shared:
        print(f"\n## Several plugins of `{section}`\n\n{COLUMNS} plugins |\n{RULE}---|")
        for row, names in shared.items():
            print(f"{row} {', '.join(names) if len(names) < len(rows_of) else 'all'} |")
    for name, rows in rows_of.items():
        if own := [row for row in rows if row not in shared]:
            print(f"\n## `{section}.name={name}`\n\n{HEADER}", *own, sep="\n")


def _row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {COMPUTED.get(key) or _default(field)} | {_one_line(field.description)} |"


def _print_table(keys: Iterable[tuple[str, FieldInfo]]) -> None:
    print(HEADER, *(_row(key, field) for key, field in keys), sep="\n")


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        nested: Any = field.annotation
        if hasattr(nested, "model_fields"):
            yield from _keys(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    return "" if default is None else f"`{default}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
