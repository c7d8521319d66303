"""Names are plain, and each has one meaning."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "mpicomm", ROOT / "benchmarks")
SOURCES = [
    path
    for package in PACKAGES
    for path in sorted(package.rglob("*.py"))
    if "examples" not in path.relative_to(ROOT).parts
]

# Idioms in the names of functions, classes, parameters and variables, tests included, as words of the name.
IDIOMS = (
    r"who|whoever|whatever|said|says?|told|tells?|everywhere|meets?|nobodys?|somebodys?|everybodys?|anybodys?|comes?|"
    r"came|coming|wish(es)?|hears?|heard|speaks?|leavers?|verbs?|back_ends?|fell|left_behind|leaves_nothing|go(es)?_on|"
    r"stands?_still|judged?"
)
IDIOM = re.compile(rf"(^|_)({IDIOMS})(?=_|$)|^test_what_|_what_(is|was|comes|does)(?=_|$)", re.IGNORECASE)


def identifiers(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("package", ["mpicomm", "benchmarks", "examples", "tests"])
def test_names_are_plain_technical_english(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert [f"{path}: {name}" for path in paths for name in identifiers(path) if IDIOM.search(name)] == []


def test_modules_of_different_packages_have_different_names() -> None:
    names = collections.Counter(path.stem for path in SOURCES if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_classes_of_different_modules_have_different_names() -> None:
    classes = collections.Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []
