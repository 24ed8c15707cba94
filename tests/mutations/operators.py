"""Operators for Cosmic Ray: they take away a statement, a check, an operand, a call or a lock.

Cosmic Ray's own operators change numbers and comparisons. What a contract of processes, streams and devices stands on
is more often a whole statement (a wait, a release) or a check.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import parso
from cosmic_ray import plugins
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import PythonBaseNode
from parso.tree import NodeOrLeaf

Target = tuple[NodeOrLeaf, str, str]

NOTHING = '__import__("contextlib").nullcontext()'
"""Stands for a lock that is not taken."""


def words(node: NodeOrLeaf) -> list[str]:
    """Return the tokens of code, without comments and line ends."""
    if hasattr(node, "children"):
        return [word for child in node.children for word in words(child)]
    return [] if node.type in ("newline", "endmarker") else [node.value]


def function_of(node: NodeOrLeaf) -> str:
    """Return the name of the function around a node, with its classes and functions, such as ``Sender.close``."""
    names: list[str] = []
    while node := node.parent:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
    return ".".join(reversed(names))


class CodeOperator(Operator):
    """An operator whose ``targets`` are triples: a node to replace, the code that names the target, and new code."""

    @abstractmethod
    def targets(self, node: PythonBaseNode) -> Iterator[Target]: ...

    def mutation_positions(self, node):
        for replaced, _, _ in self.targets(node):
            yield replaced.start_pos, replaced.end_pos

    def mutate(self, node, index):
        replaced, _, code = list(self.targets(node))[index]
        indent = "\n" + " " * replaced.start_pos[1]
        new = parso.parse(replaced.get_first_leaf().prefix + code.replace("\n", indent))
        if replaced is node:
            return new
        replaced.parent.children[replaced.parent.children.index(replaced)] = new
        return node


class DeleteStatement(CodeOperator):
    """Puts ``pass`` in the place of a statement in a function; a docstring or an import is none."""

    SPARED: ClassVar = {"string", "strings", "import_name", "import_from", "global_stmt", "nonlocal_stmt"}

    def targets(self, node):
        if node.type == "simple_stmt" and function_of(node):
            statement = node.children[0]
            if statement.type not in self.SPARED and words(statement) not in (["pass"], ["..."]):
                yield statement, statement.get_code(include_prefix=False), "pass"

    @classmethod
    def examples(cls):
        return (Example("def f():\n    wait()\n", "def f():\n    pass\n"),)


class FalseCondition(CodeOperator):
    """Puts ``False`` in the place of a condition of ``if``, ``elif``, ``while`` or a comprehension."""

    VALUE = "False"

    def targets(self, node):
        if node.type in ("if_stmt", "while_stmt", "comp_if"):
            for keyword, condition in zip(node.children, node.children[1:], strict=False):
                if keyword.type == "keyword" and keyword.value in self.KEYWORDS:
                    yield condition, condition.get_code(include_prefix=False), self.VALUE

    KEYWORDS = ("if", "elif", "while")

    @classmethod
    def examples(cls):
        return (Example("if late: fail()", "if False: fail()"),)


class TrueCondition(FalseCondition):
    """Puts ``True`` in the place of a condition of ``if``, ``elif`` or a comprehension."""

    VALUE = "True"
    KEYWORDS = ("if", "elif")

    @classmethod
    def examples(cls):
        return (Example("[x for x in y if x.done]", "[x for x in y if True]"),)


class DropOperand(CodeOperator):
    """Takes away one operand of ``and`` or ``or``."""

    def targets(self, node):
        if node.type in ("and_test", "or_test"):
            operands = node.children[::2]
            for dropped in operands:
                rest = [one.get_code(include_prefix=False) for one in operands if one is not dropped]
                code = f" {node.children[1].value} ".join(rest)
                yield node, dropped.get_code(include_prefix=False), code

    @classmethod
    def examples(cls):
        return (Example("a or not b", "a", occurrence=1), Example("a and b", "b"))


class DropCall(CodeOperator):
    """Takes away the last call of a chain inside an expression: ``x`` for ``x.contiguous()``."""

    def targets(self, node):
        if node.type in ("atom_expr", "power") and node.parent.type != "simple_stmt":
            *rest, name, call = node.children
            if rest and name.type == call.type == "trailer" and call.children[0].value == "(":
                code = "".join(child.get_code(include_prefix=child is not rest[0]) for child in rest)
                yield node, node.get_code(include_prefix=False), code

    @classmethod
    def examples(cls):
        return (Example("y = x.view(1).flat()", "y = x.view(1)"),)


class DropContext(CodeOperator):
    """Enters nothing where ``with`` has one context without a name, such as a lock."""

    def targets(self, node):
        if node.type == "with_stmt" and node.children[1].type != "with_item" and node.children[2] == ":":
            yield node.children[1], node.children[1].get_code(include_prefix=False), NOTHING

    @classmethod
    def examples(cls):
        return (Example("with lock: call()", f"with {NOTHING}: call()"),)


OPERATORS = {
    operator.__name__: operator
    for operator in (DeleteStatement, FalseCondition, TrueCondition, DropOperand, DropCall, DropContext)
}

plugins.OPERATOR_PROVIDERS["contract"] = OPERATORS
