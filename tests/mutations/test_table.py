"""The table of mutations fits the sources; whether each is caught, ``run.py`` shows (minutes)."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run.py")
PACKAGES = Path(__file__).parents[2] / "packages"
CONTRACTS, SUITES = PACKAGES / "core/src/spec_core", PACKAGES / "testing/src/spec_testing"


def load_script():
    spec = importlib.util.spec_from_file_location("mutations_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load_script()


@pytest.mark.parametrize("mutation", run.MUTATIONS, ids=lambda mutation: mutation.clause)
def test_a_mutation_applies_once_and_gives_valid_python(mutation):
    source = (run.PACKAGES[mutation.file.partition("/")[0]] / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.applied(source)
    assert mutated != source
    compile(mutated, mutation.file, "exec")


@pytest.mark.parametrize("contract", ["process_group.py", "transport.py", "rendezvous.py"])
def test_every_clause_has_a_mutation(contract):
    clauses = re.findall(r"^([PTR]\d+)  ", (CONTRACTS / contract).read_text(encoding="utf-8"), re.MULTILINE)
    assert clauses
    assert set(clauses) <= {mutation.clause for mutation in run.MUTATIONS}


@pytest.mark.parametrize("contract", ["process_group.py", "transport.py"])
def test_every_clause_is_quoted_by_a_test_of_its_suite(contract):
    clauses = re.findall(r"^([PT]\d+)  ", (CONTRACTS / contract).read_text(encoding="utf-8"), re.MULTILINE)
    suite = (SUITES / contract.replace(".py", "_suite.py")).read_text(encoding="utf-8")
    quoted = set(re.findall(r"[PT]\d+", " ".join(re.findall(r'"""[PT]\d.*', suite))))
    assert set(clauses) <= quoted
