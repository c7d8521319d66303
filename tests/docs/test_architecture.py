"""The modules and functions in docs/architecture.md exist, and its layers are those of the test of imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs import documents
from tests.launching import ROOT
from tests.unit.test_structure import LAYERS

DOCUMENT = ROOT / "docs" / "architecture.md"
TEXT = DOCUMENT.read_text()
PACKAGE = ROOT / "mpicomm"
FUNCTIONS = sorted(set(re.findall(r"`([\w/]+\.(?:py|c))`,\s+`((?![\w.]+\.py`)[\w.]+)`", TEXT)))


def defined(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module, or the functions of a source in C."""
    if path.suffix == ".c":
        return set(re.findall(r"^[\w *]+?\b(\w+)\([^;]*?\) {$", path.read_text(), re.MULTILINE))
    found: set[str] = set()
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, kinds):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_a_function_exists(module: str, name: str) -> None:
    assert name in defined(PACKAGE / module)


def test_the_layout_has_all_packages_and_modules() -> None:
    layout = documents.read(DOCUMENT).sections[1].blocks[0].text
    paths = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {path.name if path.suffix else f"{path.name}/" for path in paths if not path.name.startswith("__")}
    assert [name for name in sorted(names) if name not in layout] == []
    for name in re.findall(r"^  ([\w/.]+)  ", layout, re.MULTILINE):
        assert (PACKAGE / name).exists()


def test_the_layers_are_those_of_the_imports() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", TEXT, re.MULTILINE)
    shown = {name: int(number) for number, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert shown == {name: number for name, number in LAYERS.items() if not name.startswith("__")}
