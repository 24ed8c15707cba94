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

Made by `docs/generate_configuration.py` from the classes that validate it. A run's configuration is a YAML file, the
command's flags, and `section.key=value` words; later wins, unknown keys are errors. Nothing in a value is replaced,
and the environment is not read: write `target=$NAME` on the command line. `section.key=null` is no value;
`section.key=` is refused. [data.md](data.md) lists the bounds of what is read.
The first table holds what every run has. Sections `backend`, `draft`, `optimizer`, `strategy`, `engine` and
`launcher` have further keys, of the plugins that they name; so has `push.options.NAME` of weight transports (and its
`bucket_bytes`, which comes before `push.bucket_bytes`).
"""
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
        for record in sorted(plugins.installed(interface), key=lambda record: record.name):
            if record.distribution.startswith(OURS):
                config = plugins.load(interface, record.name).Config
                _print_plugin(f"{section}.name={record.name}", section, config, interface.Config)
    for record in plugins.installed(WeightTransport):
        if record.distribution.startswith(OURS):
            section = f"push.options.{record.name}"
            config = plugins.load(WeightTransport, record.name).Config
            _print_plugin(section, section, config, WeightTransport.Config)


def _print_plugin(title: str, section: str, config: type[BaseModel], base: type[BaseModel]) -> None:
    own = [
        (key, field)
        for key, field in _keys(config, f"{section}.")
        if key.removeprefix(f"{section}.").split(".")[0] not in base.model_fields
    ]
    if own:
        print(f"\n## `{title}`\n")
        _print_table(own)


def _print_table(keys: Iterable[tuple[str, FieldInfo]]) -> None:
    print("| key | default | meaning |\n|---|---|---|")
    for key, field in keys:
        print(f"| `{key}` | {COMPUTED.get(key) or _default(field)} | {_one_line(field.description)} |")


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
