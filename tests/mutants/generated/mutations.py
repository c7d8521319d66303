"""Generates the mutations of a module: mutmut's operators, and operators that mutmut lacks.

mutmut itself changes only the bodies of undecorated functions. Here the operators also apply to the constants and
tables of a module and to the fields of a class.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import libcst as cst
from mutmut.mutation import mutators

_Operator: TypeAlias = Callable[[Any], Iterable[cst.CSTNode]]
# Not changed: types, which nothing reads at run time, and imports and decorators, whose absence every test detects.
_SKIPPED = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
_SKIPPED_CALLS = ("len", "isinstance")  # any change of their arguments raises an exception
_SEED = 0
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of a module."""

    function: str
    """The function or method, or the class outside its methods; empty at the level of the module."""

    change: str
    """The changed lines, before and after."""

    source: str
    """The module with the change."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that may have no effect or be invalid, which is known only when it is applied."""

    module: cst.Module
    function: str
    old: cst.CSTNode
    new: cst.CSTNode
    start: int
    """The first byte of the node to replace, without preceding space."""

    def apply(self) -> Mutation | None:
        """Return None if the result is not Python, or has the same syntax tree as before."""
        source, mutated = self.module.code, self._replaced()
        try:
            if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
                return None
        except SyntaxError:
            return None
        return Mutation(self.function, _change(source.splitlines(), mutated.splitlines()), mutated)

    def _replaced(self) -> str:
        code, text = self.module.bytes, self.module.code_for_node(self.old).encode()
        start = self.start - (len(text) - len(text.lstrip()))
        if code[start : start + len(text)] == text:
            return (code[:start] + self.module.code_for_node(self.new).encode() + code[start + len(text) :]).decode()
        replaced = self.module.deep_replace(self.old, self.new)  # slower; for indented statements of several lines
        assert isinstance(replaced, cst.Module)
        return replaced.code


def generate(source: str) -> list[Candidate]:
    """Return the changes of a module in the order of its lines."""
    wrapper = cst.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    spans = wrapper.resolve(cst.metadata.ByteSpanPositionProvider)
    return [
        Candidate(wrapper.module, function, old, new, spans[old].start)
        for function, old, new in _replacements(wrapper.module, "")
    ]


def sample(candidates: list[_T], most: int) -> list[_T]:
    """Return at most `most` elements, the same ones in each run: one of each of as many intervals of equal length."""
    if len(candidates) <= most:
        return candidates
    randomness = random.Random(_SEED)
    bounds = [index * len(candidates) // most for index in range(most + 1)]
    return [candidates[randomness.randrange(start, end)] for start, end in itertools.pairwise(bounds)]


def _replacements(node: cst.CSTNode, scope: str) -> Iterator[tuple[str, cst.CSTNode, cst.CSTNode]]:
    """Yield the scope, a node and its replacement."""
    if _is_skipped(node):
        return
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        scope = f"{scope}.{node.name.value}".removeprefix(".")
    for kind, operator in (*mutators.mutation_operators, *_OPERATORS):
        if isinstance(node, kind):
            # The other changes of a string replace only its upper or lower case.
            replacements = itertools.islice(operator(node), 1 if kind is cst.BaseString else None)
            yield from ((scope, node, replacement) for replacement in replacements)
    if isinstance(node, (cst.If, cst.CompIf)) and not isinstance(node.test, (cst.Comparison, cst.UnaryOperation)):
        yield scope, node.test, _negated(node.test)  # mutmut negates the others
    for child in node.children:
        yield from _replacements(child, scope)


def _is_skipped(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call):
        return isinstance(node.func, cst.Name) and node.func.value in _SKIPPED_CALLS
    if isinstance(node, cst.If):
        return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
    return isinstance(node, _SKIPPED)


def _without_statement(node: cst.Expr | cst.Raise) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.Raise) or not isinstance(node.value, (cst.BaseString, cst.Ellipsis)):
        yield cst.Pass()


def _without_result(node: cst.Return) -> Iterator[cst.CSTNode]:
    if node.value is not None:
        yield cst.Return(cst.Name("None"))


def _negated(test: cst.BaseExpression) -> cst.BaseExpression:
    return cst.UnaryOperation(cst.Not(), test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))


_OPERATORS: tuple[tuple[type, _Operator], ...] = (
    (cst.Expr, _without_statement),
    (cst.Raise, _without_statement),
    (cst.Return, _without_result),
)


def _change(before: list[str], after: list[str]) -> str:
    pairs = zip(before, after, strict=False)
    start = next((index for index, (old, new) in enumerate(pairs) if old != new), min(len(before), len(after)))
    before, after = before[start:], after[start:]
    pairs = zip(reversed(before), reversed(after), strict=False)
    end = next((index for index, (old, new) in enumerate(pairs) if old != new), min(len(before), len(after)))
    changed = (lines[: len(lines) - end] for lines in (before, after))
    return " -> ".join(" ".join(map(str.strip, lines)) for lines in changed)
