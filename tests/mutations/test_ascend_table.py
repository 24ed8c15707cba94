"""The table of the Ascend backend's mutations fits the sources; what is caught, ``make mutations-ascend`` shows."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("ascend_mutations", ROOT / "tests/rigs/ascend_mutations.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.mark.parametrize(
    "index", range(len(script.MUTATIONS)), ids=lambda index: script.MUTATIONS[index].file
)
def test_a_mutation_applies_once_and_gives_valid_python(index):
    mutation = script.MUTATIONS[index]
    (package,) = [package for package in script.PACKAGES if package.name == Path(mutation.file).parts[0]]
    source = (package.parent / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.applied(source)
    assert mutated != source
    compile(mutated, mutation.file, "exec")


def test_every_mutation_has_a_test():
    for mutation in script.MUTATIONS:
        file, name = re.fullmatch(r"([\w/.]+)::(?:\w+::)?(\w+)(?:\[.*\])?", mutation.test).groups()
        inherited = [*(ROOT / "packages/testing/src/spec_testing").glob("*.py")]
        sources = [(ROOT / file).read_text(), *(suite.read_text() for suite in inherited)]
        assert any(f"def {name}(" in source for source in sources), mutation.test
