"""``.ci/install.py`` gives uv what pip's configuration says, or leaves the work to pip."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / ".ci" / "install.py"
BEST = ["--index-strategy", "unsafe-best-match"]


@pytest.fixture(scope="module")
def uv_flags():
    return runpy.run_path(str(INSTALL))["uv_flags"]


def configuration(folder: Path, text: str, **variables: str) -> str:
    """Return what pip prints of a file and of variables, and of nothing else."""
    file = folder / "pip.conf"
    file.write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # PIP_CONFIG_FILE names the last file that pip reads: the machine's own may add keys.
    environment = {**kept, "PIP_CONFIG_FILE": str(file), "XDG_CONFIG_DIRS": str(folder), "HOME": str(folder)}
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    ).stdout


def test_indexes_links_and_constraints_of_files_and_variables_reach_uv(tmp_path, uv_flags):
    text = (
        "[global]\nindex-url = https://a/simple\nextra-index-url = https://b https://c\nfind-links = /old\n"
    )
    found = uv_flags(configuration(tmp_path, text, PIP_FIND_LINKS="/new", PIP_DEFAULT_TIMEOUT="9"))
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert [pair for pair in pairs if pair[0] != "--constraint"] == [
        ("--default-index", "https://a/simple"),
        ("--index", "https://b"),
        ("--index", "https://c"),
        ("--find-links", "/new"),
        tuple(BEST),
    ]


def test_without_a_configuration_uv_asks_its_own_index(uv_flags):
    assert uv_flags("") == BEST


def test_keys_of_other_commands_do_not_matter(uv_flags):
    assert uv_flags("list.format='json'\ninstall.find-links='/wheels'\n") == [
        "--find-links",
        "/wheels",
        *BEST,
    ]


@pytest.mark.parametrize("line", ["global.no-index='true'", ":env:.only-binary=':all:'"])
def test_what_uv_is_not_told_is_left_to_pip(uv_flags, line):
    assert uv_flags(f"global.find-links='/wheels'\n{line}\n") is None
