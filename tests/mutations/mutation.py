"""Names one mutant of Cosmic Ray by the code that it changes, and the one test that must fail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.work_item import MutationSpec
from tests.mutations.operators import OPERATORS, CodeOperator, function_of, words

if TYPE_CHECKING:
    from parso.python.tree import Module

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """One change to ``code`` in a function, by which ``test`` must fail.

    ``code`` names what the operator changes: a statement, a condition, an operand, a call, a lock. It stands once in
    the function, or ``nth`` counts from 0. Comments, line ends and the words of a message do not matter: an f-string
    and a string with a blank stand as ``""``.
    """

    proves: str
    file: str
    function: str
    operator: str
    code: str
    test: str
    new: str = ""
    nth: int | None = None

    @property
    def path(self) -> Path:
        """The file, relative to the repository."""
        (path,) = ROOT.glob(f"packages/*/src/{self.file}")
        return path.relative_to(ROOT)

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments of the operator."""
        return {"code": self.code, "new": self.new} if self.new else {}

    def find(self) -> MutationSpec:
        """Return the mutant. Raise ValueError unless the code names one target in the sources."""
        operator: CodeOperator = OPERATORS[self.operator](**self.arguments)
        wanted = words(parso.parse(self.code))
        tree = _tree(ROOT / self.path)
        targets = [(node, target) for node in ast_nodes(tree) for target in operator.targets(node)]
        found = [
            (occurrence, node)
            for occurrence, (node, (_, code, _)) in enumerate(targets)
            if words(parso.parse(code)) == wanted and function_of(node) == self.function
        ]
        if len(found) <= (self.nth or 0) or (len(found) > 1 and self.nth is None):
            raise ValueError(
                f"{self.operator} finds {self.code!r} {len(found)} times in {self.function} of {self.file}: a row "
                "names one place, or says which by `nth`"
            )
        occurrence, node = found[self.nth or 0]
        return MutationSpec(
            module_path=self.path,
            operator_name=f"contract/{self.operator}",
            operator_args=self.arguments,
            occurrence=occurrence,
            start_pos=node.start_pos,
            end_pos=node.end_pos,
            definition_name=self.function,
        )


@cache
def _tree(path: Path) -> Module:
    return parso.parse(path.read_text(encoding="utf-8"))
