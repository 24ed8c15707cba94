"""The Dockerfiles, as far as can be seen without docker: no image is built here."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from spec_engine_vllm.versions import VERSIONS

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
MEMBERS = {
    project["name"]: project
    for file in ROOT.glob("*/*/pyproject.toml")
    for project in [tomllib.loads(file.read_text())["project"]]
}


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return each instruction's name and the rest of its line."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_is_copied_is_there(file):
    stages = {rest.partition(" AS ")[2] for name, rest in instructions(file) if name == "FROM"}
    for words in (rest.split() for name, rest in instructions(file) if name == "COPY"):
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        else:
            assert [word for word in words[:-1] if not (ROOT / word).exists()] == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_each_member_that_pip_installs_has_the_extras(file):
    words = [word for name, rest in instructions(file) if name == "RUN" for word in shlex.split(rest)]
    wanted = [Requirement(word) for word in words if word.startswith("spec-")]
    assert "spec-trainer" in {requirement.name for requirement in wanted}
    for requirement in wanted:
        extras = MEMBERS[requirement.name].get("optional-dependencies", {})
        assert requirement.extras <= extras.keys(), requirement


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_starts_the_command(file):
    ((_, entrypoint),) = [one for one in instructions(file) if one[0] == "ENTRYPOINT"]
    (program,) = re.findall(r'"([^"]+)"', entrypoint)
    assert program in MEMBERS["spec-trainer"]["scripts"]


def test_the_image_of_vllm_is_of_a_version_that_the_engine_works_with():
    tags = [
        match[1]
        for file in DOCKERFILES
        for name, rest in instructions(file)
        if name == "FROM" and (match := re.match(r"vllm/vllm-openai:v(\S+)", rest))
    ]
    assert len(tags) == 1
    assert tags[0] in SpecifierSet(VERSIONS)
