"""Functions that check what an engine says about serving a draft's export."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from spec_core.errors import ConfigError
from spec_core.records import Availability
from spec_kit.drafting import recognise

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.engine import Engine


def assert_serving_command(engine: Engine, draft_folder: Path) -> None:
    """Assert that the serving command is one line that names the target and the draft (E15)."""
    draft = recognise(draft_folder, engine.target)
    if engine.name not in draft.serving_methods:
        pytest.skip("the draft does not name the engine")
    command = engine.serving_command(engine.target, draft, draft_folder, 2)
    if command is None:
        pytest.skip("the engine has no program that users start")
    words = shlex.split(command)
    assert "\n" not in command
    assert str(engine.target.folder) in words
    assert any(str(draft_folder) in word for word in words)


def assert_live_server_words(engine: Engine) -> None:
    """Assert that the words of a server for ``follow`` name the port, and each of them is a word of a shell (E20)."""
    words = engine.live_server_words("127.0.0.1", 54321)
    if words is None:
        pytest.skip("the engine has no server that follow can start")
    assert any("54321" in word for word in words)
    assert shlex.split(shlex.join(words)) == list(words)


def assert_serving(engine: Engine, draft_folder: Path) -> None:
    """Assert that the engine says whether it serves the draft; if not, one line names what would (E19)."""
    draft = recognise(draft_folder, engine.target)
    if engine.name not in draft.serving_methods:
        with pytest.raises(ConfigError, match=r"\A[^\n]+\Z"):
            engine.serving(engine.target, draft)
        return
    found = engine.serving(engine.target, draft)
    assert isinstance(found, Availability)
    assert found.ok or found.reason
    assert "\n" not in found.reason
