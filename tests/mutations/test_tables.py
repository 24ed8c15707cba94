"""The tables of mutations fit the sources; whether each is caught, ``make mutations`` shows."""

from __future__ import annotations

import re

import pytest
from cosmic_ray.mutating import mutate_code
from tests.mutations.ascend import MUTATIONS as ASCEND
from tests.mutations.clauses import MUTATIONS as CLAUSES
from tests.mutations.mutation import ROOT, Mutation
from tests.mutations.operators import OPERATORS

CONTRACTS, SUITES = ROOT / "packages/core/src/spec_core", ROOT / "packages/testing/src/spec_testing"


@pytest.mark.parametrize("mutation", [*CLAUSES, *ASCEND], ids=lambda one: f"{one.proves}-{one.function}")
def test_a_mutation_names_one_place_and_gives_valid_python(mutation):
    source = (ROOT / mutation.path).read_text(encoding="utf-8")
    operator = OPERATORS[mutation.operator](**mutation.arguments)
    mutated = mutate_code(source, operator, mutation.find().occurrence)
    assert mutated != source
    compile(mutated, mutation.file, "exec")


def test_every_mutation_has_a_test():
    suites = "".join(suite.read_text(encoding="utf-8") for suite in SUITES.glob("*.py"))
    for mutation in [*CLAUSES, *ASCEND]:
        file, name = re.fullmatch(r"([\w/.]+)::(?:\w+::)?(\w+)(?:\[.*\])?", mutation.test).groups()
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") + suites, mutation.test


def test_a_place_that_two_statements_share_must_be_counted():
    twice = Mutation(
        *("the group", "spec_kit/streams/async_sender.py", "AsyncSender.close", "DeleteStatement"),
        *("announcing.join(CLOSE_S)", "tests/none.py::test_none"),
    )
    with pytest.raises(ValueError, match=r"2 times in AsyncSender\.close"):
        twice.find()


@pytest.mark.parametrize(
    ("name", "example"),
    [(name, example) for name, operator in OPERATORS.items() for example in operator.examples()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_operator_changes_what_its_example_says(name, example):
    operator = OPERATORS[name](**example.operator_args)
    assert mutate_code(example.pre_mutation_code, operator, example.occurrence) == example.post_mutation_code


def test_neither_comments_nor_the_words_of_a_message_name_a_place():
    operator = OPERATORS["ReplaceCode"](code='raise Late("the sender was late") from error', new="pass")
    source = 'if late:\n    raise Late(  # for a reason\n        "it was late"\n    ) from error\n'
    assert mutate_code(source, operator, 0) == "if late:\n    pass\n"


@pytest.mark.parametrize("contract", ["process_group.py", "transport.py", "rendezvous.py"])
def test_every_clause_has_a_mutation(contract):
    clauses = re.findall(r"^([PTR]\d+)  ", (CONTRACTS / contract).read_text(encoding="utf-8"), re.MULTILINE)
    assert clauses
    assert set(clauses) <= {mutation.proves for mutation in CLAUSES}
