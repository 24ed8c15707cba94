"""The page on compatibility says what the code says."""

import re
from pathlib import Path

from spec_core.plugins import INTERFACES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_versions_of_the_interfaces_are_those_of_core():
    rows = re.findall(
        r"^\| `(\w+)` \| `api_version = (\d+)` \| `(\w+)\.API_VERSIONS`: (.+) \|$", PAGE.read_text(), re.M
    )
    assert rows == [
        (kind.__name__, str(kind.API_VERSIONS[-1]), kind.__name__, ", ".join(map(str, reversed(kind.API_VERSIONS))))
        for kind in INTERFACES
    ]  # fmt: skip
