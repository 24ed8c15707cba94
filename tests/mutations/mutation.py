"""Names places in the code by a function and a word, and the one test that must fail if one of them is changed."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.work_item import MutationSpec
from parso.python.tree import Module
from parso.tree import NodeOrLeaf
from tests.mutations.operators import OPERATORS, function_of, words

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """``test`` must fail by one of the changes to what contains ``word`` in a function."""

    proves: str
    file: str
    function: str
    word: str
    test: str

    @property
    def path(self) -> Path:
        """The file, relative to the repository."""
        (path,) = ROOT.glob(f"packages/*/src/{self.file}")
        return path.relative_to(ROOT)

    def mutants(self) -> list[MutationSpec]:
        """Return a mutant for each operator and each statement, condition, operand, call or lock with the word."""
        return [
            MutationSpec(
                module_path=self.path,
                operator_name=f"contract/{name}",
                operator_args={},
                occurrence=occurrence,
                start_pos=node.start_pos,
                end_pos=node.end_pos,
                definition_name=self.function,
            )
            for name in OPERATORS
            for occurrence, (node, function, code) in enumerate(_targets(ROOT / self.path, name))
            if function == self.function and self.word in words(parso.parse(code))
        ]


def read_table(name: str) -> list[Row]:
    """Return the rows of a table."""
    found, heading = [], ["", ""]
    for line in (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            proves, function, word, test = line.split()
            found.append(Row(proves, heading[0], function, word, f"{heading[1]}::{test}"))
        elif line and not line.startswith("#"):
            heading = line.split()
    return found


@cache
def _tree(path: Path) -> Module:
    return parso.parse(path.read_text(encoding="utf-8"))


@cache
def _targets(path: Path, operator: str) -> list[tuple[NodeOrLeaf, str, str]]:
    """Return what an operator changes in a file: its node, the function around it, and its code."""
    return [
        (node, function_of(node), code)
        for node in ast_nodes(_tree(path))
        for _, code, _ in OPERATORS[operator]().targets(node)
    ]
