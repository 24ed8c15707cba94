"""A folder in which the commands of pages can be run."""

import pytest

from ..made_once import made_once
from .workplace import make_workplace


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    return made_once(tmp_path_factory, "workplace", make_workplace)


@pytest.fixture
def here(workplace, tmp_path, monkeypatch):
    """A folder of the test's own with what is in the workplace."""
    for file in workplace.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path
