"""The tables of docs/architecture.md have the order that the import linter enforces."""

import re
import tomllib

from .sources import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]


def layers(name: str) -> list[set[str]]:
    """Layers of a contract, the lowest first."""
    (found,) = (contract["layers"] for contract in CONTRACTS if contract["id"] == name)
    return [set(re.findall(r"\w+", layer)) for layer in reversed(found)]


def test_rooms_of_the_application_are_printed_in_the_linters_order():
    _, _, table = PAGE.partition("## The rooms of the application")
    rooms = re.findall(r"^\| `(\w+)` \|", table.partition("\n## ")[0], re.MULTILINE)
    assert [{room} for room in rooms] == layers("application")


def test_libraries_of_the_kit_are_printed_in_the_linters_layers():
    printed: dict[str, set[str]] = {}
    for layer, names in re.findall(r"^\| (\d) \| (`spec_kit[^|]*)\|", PAGE, re.MULTILINE):
        printed.setdefault(layer, set()).update(re.findall(r"`(?:spec_kit)?\.(\w+)`", names))
    assert list(printed.values()) == layers("kit")
