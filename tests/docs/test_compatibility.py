"""The page on compatibility says what the code says."""

import re
from pathlib import Path

from spec_core.plugins import INTERFACES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_versions_of_the_interfaces_are_those_of_core():
    said = re.search(
        r"`api_version = (\d+)`, and this\s+release accepts version (\d+) of (.+?)\s+\(`API_VERSIONS`\)",
        PAGE.read_text(),
        re.DOTALL,
    )
    assert said
    names = re.findall(r"`(\w+)`", said[3])
    assert names == [kind.__name__ for kind in INTERFACES]
    assert all([said[1], said[2]] == [*map(str, kind.API_VERSIONS)] * 2 for kind in INTERFACES)
