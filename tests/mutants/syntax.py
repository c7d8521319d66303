"""Finds and replaces parts of the package by their syntax, so that a change of layout, comments or modules is harmless.

A scope is a module, class or function, identified by the end of its full name: `Executor.submit` for
`mpicomm.backend.execution.executor.Executor.submit`. The code within it is compared as a syntax tree.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TEXTS = (".j2", ".c")  # suffixes of files that are no modules
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
# Expressions that cannot be read in another way beside an operator.
_WITHOUT_PARENTHESES = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)


@dataclasses.dataclass(frozen=True)
class Module:
    """A module, its syntax tree, and the scopes in it by full name; a property and its setter have the same name."""

    path: Path
    source: str
    tree: ast.Module
    scopes: dict[str, list[ast.AST]]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A module with other content."""

    path: Path
    source: str


def read_package(root: Path) -> list[Module]:
    """Read all modules below a directory, and templates and sources in C, which have no scopes."""
    texts = sorted(path for suffix in _TEXTS for path in root.rglob(f"*{suffix}"))
    return [
        *(_read(path, root) for path in sorted(root.rglob("*.py"))),
        *(Module(path, path.read_text(), ast.Module([], []), {}) for path in texts),
    ]


def replace(package: list[Module], place: str, old: str, new: str) -> Replacement:
    """Replace the code `old`, which must occur exactly once in the scopes `place`, by `new`.

    Args:
        place: The end of the full name of one or several scopes, or the file name of a template or of a source in C,
            which is compared as text.
        old: An expression, one or several statements, or the header of a compound statement, which ends in a colon:
            `if x:`, `except E:`, `def f(x):`. A header is compared and replaced without its block.
        new: The same kind of code; if empty, statements are removed.

    Raises:
        ValueError: If the code is not found exactly once.
    """
    if template := next((module for module in package if module.path.name == place), None):
        if (count := template.source.count(old)) != 1:
            raise ValueError(_message(place, old, count))
        return Replacement(template.path, template.source.replace(old, new))
    module, span = _find(package, place, old, new)
    return Replacement(module.path, _replaced(module.source, span, textwrap.dedent(new).strip()))


def statement(package: list[Module], place: str, old: str, new: str) -> tuple[Path, int, int] | None:
    """Return where the innermost statement of a function that contains this code begins: file, line and column.

    The code can be executed only after a statement that is inserted there. None outside of functions, and in files that
    are no modules.
    Arguments and errors as for `replace`.
    """
    if place.endswith(_TEXTS):
        return None
    module, (node, *_) = _find(package, place, old, new)
    if isinstance(node, _FUNCTIONS):
        line, column = _start(node.body[0])
        return module.path, line + 1, column
    around = [
        part
        for function in ast.walk(module.tree)
        if isinstance(function, _FUNCTIONS)
        for block in _blocks(function)
        for part in block
        if isinstance(part, ast.stmt) and any(child is node for child in ast.walk(part)) and not _is_elif(part, module)
    ]
    if not around:
        return None
    line, column = _start(max(around, key=_start))
    return module.path, line + 1, column


def _is_elif(node: Any, module: Module) -> bool:
    return module.source.encode().split(b"\n")[node.lineno - 1][node.col_offset :].startswith(b"elif")


def _find(package: list[Module], place: str, old: str, new: str) -> tuple[Module, list[Any]]:
    old, new = textwrap.dedent(old).strip(), textwrap.dedent(new).strip()
    spans = {
        id(span[0]): (module, span)  # once, if a module and a function in it have the same name
        for module in package
        for name, scopes in module.scopes.items()
        if f".{name}".endswith(f".{place}")
        for scope in scopes
        for span in _spans(scope, old, new)
    }
    if len(spans) != 1:
        raise ValueError(_message(place, old, len(spans)))
    return next(iter(spans.values()))


def _message(place: str, old: str, count: int) -> str:
    return f"{place}: expected this code once, found it {count} times:\n{old}\nUpdate the mutant."


def _read(path: Path, root: Path) -> Module:
    source = path.read_text()
    tree = ast.parse(source)
    name = ".".join(part for part in path.relative_to(root.parent).with_suffix("").parts if part != "__init__")
    scopes: dict[str, list[ast.AST]] = {name: [tree]}
    _add_scopes(tree, name, scopes)
    return Module(path, source, tree, scopes)


def _add_scopes(node: ast.AST, name: str, scopes: dict[str, list[ast.AST]]) -> None:
    for child in ast.iter_child_nodes(node):
        child_name = name
        if isinstance(child, _SCOPES):
            child_name = f"{name}.{child.name}"
            scopes.setdefault(child_name, []).append(child)
        _add_scopes(child, child_name, scopes)


def _spans(scope: ast.AST, old: str, new: str) -> Iterator[list[Any]]:
    """Yield the nodes that are equal to the code: one node, consecutive statements, or a node without its block."""
    if old.endswith(":"):
        sought = _key(_without_block(_parse_header(old)))
        yield from ([node] for node in ast.walk(scope) if _has_block(node) and _key(_without_block(node)) == sought)
    elif (expression := _expression(old)) is not None and _expression(new) is not None:
        sought = _key(expression)
        yield from ([node] for node in ast.walk(scope) if isinstance(node, ast.expr) and _key(node) == sought)
    else:
        keys = [_key(statement) for statement in ast.parse(old).body]
        for block in _blocks(scope):
            runs = (block[start : start + len(keys)] for start in range(len(block) - len(keys) + 1))
            yield from (run for run in runs if [_key(node) for node in run] == keys)


def _expression(code: str) -> ast.expr | None:
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        return None


def _blocks(scope: ast.AST) -> Iterator[list[ast.AST]]:
    for node in ast.walk(scope):
        blocks = [getattr(node, name, None) for name in _BLOCKS]
        yield from (block for block in blocks if isinstance(block, list))


def _parse_header(header: str) -> Any:
    if header.startswith("except"):
        return ast.parse(f"try:\n    pass\n{header}\n    pass").body[0].handlers[0]
    if header.startswith("case"):
        return ast.parse(f"match x:\n    {header}\n        pass").body[0].cases[0]
    return ast.parse(f"{header.removeprefix('el')}\n    pass").body[0]


def _has_block(node: ast.AST) -> bool:
    return not isinstance(node, ast.Module) and isinstance(getattr(node, "body", None), list)


def _without_block(node: ast.AST) -> ast.AST:
    header = copy.copy(node)
    for name in _BLOCKS:
        if hasattr(header, name):
            setattr(header, name, [])
    return header


def _key(node: ast.AST) -> str:
    """Return a text that is equal for equal code, whether it is read, assigned or deleted."""
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def _replaced(source: str, nodes: list[Any], new: str) -> str:
    lines = source.encode().split(b"\n")
    first, last = nodes[0], nodes[-1]
    start, column = _start(first)
    before = lines[start][:column]
    if new.endswith(":"):
        last_line, last_column = _header_end(first), None
        new = f"el{new}" if new.startswith("if") and lines[start][column:].startswith(b"elif") else new
    else:
        last_line, last_column = last.end_lineno - 1, last.end_col_offset
    after = b"" if last_column is None else lines[last_line][last_column:]
    if isinstance(first, ast.expr):
        text = new if isinstance(_expression(new), _WITHOUT_PARENTHESES) else f"({new})"
    else:
        text = (new or "pass").replace("\n", "\n" + " " * column)
    lines[start : last_line + 1] = [before + text.encode() + after]
    return b"\n".join(lines).decode()


def _start(node: Any) -> tuple[int, int]:
    """Return the index of the line, and the column in bytes, at which a node begins, with its decorators."""
    if isinstance(node, ast.match_case):  # has no position; the pattern follows `case `
        return node.pattern.lineno - 1, node.pattern.col_offset - len("case ")
    decorators = getattr(node, "decorator_list", [])
    return min(part.lineno for part in [node, *decorators]) - 1, node.col_offset


def _header_end(node: Any) -> int:
    """Return the index of the last line of a header; comments between header and block are part of it."""
    return _start(node.body[0])[0] - 1
