"""Extend the shell completion of cyclopts by plugin names, configuration keys and files.

The names and keys belong to the plugins that are installed when the script is printed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel

from spec_core import plugins
from spec_core.errors import SpecError
from spec_trainer.configuration.run import SECTIONS, run_config_type
from spec_trainer.configuration.track import track_config_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cyclopts import App

_FILES = ("target", "data")
"""Flags that take a file, a folder or a hub id."""
_PLAIN = re.compile(r"[\w.-]+")
"""Names that are safe in a shell script without quotes; other names of plugins are left out."""
_WITH_KEYS = ("train", "plan", "capture", "regenerate", "evaluate")
"""Commands that take ``section.key=value`` arguments."""


def completion_script(app: App, shell: Literal["bash", "zsh", "fish"]) -> str:
    """Return cyclopts' completion script with this project's additions."""
    ours = {"bash": lambda: _bash(app), "zsh": _zsh, "fish": lambda: _fish(app)}[shell]
    return app.generate_completion(shell=shell) + ours()


def _plugin_names() -> dict[str, list[str]]:
    """Return section -> names of the installed plugins that are safe in a shell script."""
    return {
        section: sorted(
            {found.name for found in plugins.installed(interface) if _PLAIN.fullmatch(found.name)}
        )
        for section, interface in SECTIONS.items()
    }


def _keys() -> list[str]:
    """Return all configuration keys, including the keys of all installed plugins."""
    found = set(_keys_of(run_config_type(track=track_config_type()), ""))
    for section, interface in SECTIONS.items():
        for record in plugins.installed(interface):
            with suppress(SpecError):  # a plugin that cannot be loaded; `spec-trainer plugins` says why
                found |= set(_keys_of(plugins.load(interface, record.name).Config, f"{section}."))
    return sorted(filter(_PLAIN.fullmatch, found))


def _keys_of(config: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _cases(then: str) -> str:
    """Return the branches of a shell ``case`` statement that completes the names of plugins.

    There is a branch for each flag that takes a plugin's name, such as ``--engine``. ``then`` is the code of
    a branch; ``{}`` in it stands for the plugins' names.
    """
    return "\n".join(
        f"    --{flag}) {then.format(' '.join(names))} ;;" for flag, names in _plugin_names().items()
    )


def _bash(app: App) -> str:
    words = " ".join(f"{key}=" for key in _keys())
    # A file's name may hold code, and bash inserts COMPREPLY as it is. So cyclopts' `compgen -f` is never reached: an
    # empty COMPREPLY with `-o default` leaves files to readline, which quotes them.
    return f"""
_spec_trainer_all() {{
  typeset cur="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [[ "$before" == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  COMPREPLY=()
  case "$before" in
{_cases('COMPREPLY=($(compgen -W "{}" -- "$cur")); return')}
    {"|".join(_path_flags(app))}) return ;;
  esac
  _spec_trainer
  if [[ ${{#COMPREPLY[@]}} == 0 && "$cur" != -* && "$before" != --* && {_takes_keys("${COMP_WORDS[1]}")} ]]; then
    COMPREPLY=($(compgen -W "{words}" -- "$cur")); compopt -o nospace 2>/dev/null
  fi
}}
complete -o default -F _spec_trainer_all spec-trainer
"""


def _path_flags(app: App) -> list[str]:
    """Return the flags of all commands that take a path."""
    found = {f"--{flag}" for flag in _FILES}
    for command in _command_names(app):
        for argument in app[command].assemble_argument_collection():
            if Path in (argument.hint, *get_args(argument.hint)):
                found |= {name for name in argument.names if name.startswith("--")}
    return sorted(found)


def _takes_keys(command: str) -> str:
    return f'" {" ".join(_WITH_KEYS)} " == *" {command} "*'


def _zsh() -> str:
    files = "|".join(f"--{flag}" for flag in _FILES)
    words = " ".join(f"{key}=" for key in _keys())
    # cyclopts' script defines a function, which a file of that very name in $fpath would call. Other names, and
    # `source`:
    return f"""
_spec_trainer_all() {{
  case ${{words[CURRENT-1]}} in
{_cases("compadd -- {}; return")}
    {files}) _files; return ;;
  esac
  if [[ $CURRENT -gt 2 && ${{words[CURRENT]}} != -* && ${{words[CURRENT-1]}} != --* \
&& {_takes_keys("${words[2]}")} ]]; then
    compadd -S '' -- {words}
  fi
  _cyclopts_spec-trainer "$@"
}}
if [[ ${{funcstack[1]}} == _* ]]; then
  _spec_trainer_all "$@"
else
  compdef _spec_trainer_all spec-trainer
fi
"""


def _fish(app: App) -> str:
    def line(flag: str, then: str) -> str:
        return f"complete -c spec-trainer -n '__fish_seen_subcommand_from {_commands(app, flag)}' -l {flag} {then}"

    lines = [line(flag, "-r -F") for flag in _FILES]
    lines += [
        line(flag, f"-x -a '{' '.join(names)}'")
        for flag, names in _plugin_names().items()
        if _commands(app, flag)
    ]
    words = " ".join(f"{key}=" for key in _keys())
    lines.append(
        f"complete -c spec-trainer -f -n '__fish_seen_subcommand_from {' '.join(_WITH_KEYS)}' -a '{words}'"
    )
    return "\n".join(lines) + "\n"


def _commands(app: App, flag: str) -> str:
    """Return the names of all commands that accept ``flag``, separated by spaces."""
    return " ".join(
        command
        for command in _command_names(app)
        if any(f"--{flag}" in argument.names for argument in app[command].assemble_argument_collection())
    )


def _command_names(app: App) -> list[str]:
    return [command for command in app if not command.startswith("-")]
