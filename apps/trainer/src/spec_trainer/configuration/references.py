"""Replace each reference ``${section.key}`` in a configuration by that key's value.

Environment variables are not allowed between ``${`` and ``}``. So a run does not depend on the environment, and no
variable's content is copied into run directories, checkpoints and requests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from spec_core.errors import ConfigError
from spec_core.wording import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANY = re.compile(r"(?<!\\)\$\{([^}]*)\}?")
_KEY = re.compile(r"\w[\w-]*(?:\.\w[\w-]*)*")
_MOST = 1000
_LONGEST = 1 << 16
"""Largest number of characters of one value. This limit and ``_MOST`` bound the growth of references to
references."""


def check_references(text: str, where: str) -> None:
    """Raise ConfigError for a ``${…}`` that is not the name of another key."""
    for reference in _ANY.finditer(text):
        if not (_KEY.fullmatch(reference[1]) and reference[0].endswith("}")):
            raise ConfigError(
                f"{where}: {shown(reference[0])} is no reference to another key, such as ${{train.lr}}; "
                "configuration does not read the environment: give the value on the command line instead, "
                "such as target=$NAME"
            )


def resolve_references(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with every reference replaced.

    Raise ConfigError for a missing key, for a circular reference, and if there are too many references or a value
    grows too long.
    """
    return _Resolver(values).resolve(dict(values), ())


class _Resolver:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._left = _MOST

    def resolve(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return ``value`` with its references replaced.

        ``path``: the keys whose references are being replaced now; a reference to one of them is circular.
        """
        if isinstance(value, dict):
            return {key: self.resolve(part, path) for key, part in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [self.resolve(part, path) for part in cast("list[Any]", value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _ANY.fullmatch(value)
        if whole:
            return self._look_up(whole[1], path)
        text = _ANY.sub(lambda reference: str(self._look_up(reference[1], path)), value)
        if len(text) > _LONGEST:
            raise ConfigError(f"{shown(value)} grows to more than {_LONGEST} characters")
        return text.replace("\\${", "${")

    def _look_up(self, key: str, path: tuple[str, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ConfigError(f"the configuration has more than {_MOST} references to other keys, in all")
        if key in path:
            raise ConfigError(f"${{{key}}} refers to itself ({' -> '.join([*path, key])})")
        found: Any = self._values
        for name in key.split("."):
            if not isinstance(found, dict) or name not in found:
                raise ConfigError(f"${{{shown(key)[1:-1]}}}: there is no key of that name")
            found = cast("dict[str, Any]", found)[name]
        return self.resolve(found, (*path, key))
