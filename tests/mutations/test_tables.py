"""The tables of mutations fit the sources; whether each row is noticed, ``make mutations`` shows."""

import re

import pytest
from cosmic_ray.mutating import mutate_code
from tests.mutations.mutation import ROOT, read_table
from tests.mutations.operators import OPERATORS

CONTRACTS, SUITES = ROOT / "packages/core/src/spec_core", ROOT / "packages/testing/src/spec_testing"
CLAUSES, ASCEND = read_table("clauses"), read_table("ascend")


@pytest.mark.parametrize("row", [*CLAUSES, *ASCEND], ids=lambda row: f"{row.proves}-{row.function}")
def test_row_names_code_whose_mutants_are_valid_python(row):
    source = (ROOT / row.path).read_text(encoding="utf-8")
    mutants = row.mutants()
    assert mutants
    for mutant in mutants:
        mutated = mutate_code(source, OPERATORS[mutant.operator_name.partition("/")[2]](), mutant.occurrence)
        assert mutated != source
        compile(mutated, row.file, "exec")


def test_every_row_has_a_test():
    suites = "".join(suite.read_text(encoding="utf-8") for suite in SUITES.glob("*.py"))
    for row in [*CLAUSES, *ASCEND]:
        file, name = re.fullmatch(r"([\w/.]+)::(?:\w+::)?(\w+)(?:\[.*\])?", row.test).groups()
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") + suites, row.test


@pytest.mark.parametrize(
    ("name", "example"),
    [(name, example) for name, operator in OPERATORS.items() for example in operator.examples()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operator_changes_what_its_example_says(name, example):
    changed = mutate_code(example.pre_mutation_code, OPERATORS[name](), example.occurrence)
    assert changed == example.post_mutation_code


@pytest.mark.parametrize("contract", ["process_group.py", "transport.py", "rendezvous.py"])
def test_every_clause_has_a_row(contract):
    clauses = re.findall(r"^([PTR]\d+)  ", (CONTRACTS / contract).read_text(encoding="utf-8"), re.MULTILINE)
    assert clauses
    assert set(clauses) <= {row.proves for row in CLAUSES}
