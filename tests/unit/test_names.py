"""Replaced names are absent from the project, and each name has one meaning."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
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

# Replaced names of modules, classes, functions, parameters and attributes, as whole words.
OLD_MODULES = [
    "atonce",
    "awareness",
    "routes",
    "routed",
    "engine",
    "wire",
    "nodepath",
    "progress",
    "c10d",
    "node",
    "direct",
    "bysegment",
    "levels",
    "sums",
    "faults",
    "judge",
    "neighbours",
    "opening",
    "recorder",
    "abort",
    "rollcall",
    "verbs",
    "members",
    "moving",
    "pairs",
    "parcels",
    "starting",
    "leaves",
    "containers",
    "agreed",
    "startcommand",
    "launchers",
    "in_ranks",
    "starts",
    "surroundings",
    "first_words",
    "inventory",
    "values",
]
OLD_IDENTIFIERS = [
    "AtOnce",
    "Ballot",
    "BySegment",
    "Cut",
    "Direct",
    "Feed",
    "Judge",
    "Neighbour",
    "NodePath",
    "Opening",
    "OwnLoader",
    "Replicated",
    "RoutedProcessGroup",
    "Seat",
    "TwoLevels",
    "Wish",
    "apart",
    "be",
    "clip_norm",
    "find_unused",
    "if_not_finite",
    "in_ranks",
    "let_go",
    "roll_call",
    "room",
    "said",
    "spoil",
    "verb",
    "ballot",
    "everybodys",
    "judge",
    "mates",
    "neighbour",
    "seat",
    "speaks",
    "wish",
]
# Replaced settings, options and public names, anywhere in the text of the project.
OLD_WORDS = [
    r"MPICOMM_TIMEOUT\b",
    r"MPICOMM_GPU_TENSORS\b",
    r"mpicomm\.dump\b",
    r"--backend[ =]\S*\braw\b",
    r"\b(hook|clip_norm|accumulate|find_unused|if_not_finite|margin|show|keep)=[^=].*\bTrainer\(",
    r"\bTrainer\(.*\b(hook|clip_norm|accumulate|find_unused|if_not_finite|margin|show|keep)=",
    r"(?i)\bthe verbs?\b",
    r"(?i)\bback ends?\b",
]
# Idioms in the names of functions, classes, parameters and variables, tests included, as words of the name.
IDIOMS = (
    r"who|whoever|whatever|said|says?|told|tells?|everywhere|meets?|nobodys?|somebodys?|everybodys?|anybodys?|comes?|"
    r"came|coming|wish(es)?|hears?|heard|speaks?|leavers?|verbs?|back_ends?|fell|left_behind|leaves_nothing|go(es)?_on|"
    r"stands?_still|judged?"
)
IDIOM = re.compile(rf"(^|_)({IDIOMS})(?=_|$)|^test_what_|_what_(is|was|comes|does)(?=_|$)", re.IGNORECASE)
TEXT = {".py", ".md", ".toml", ".sh", ".sbatch", ".pbs", ".yml", ".yaml", ".cff", ""}


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_old_name_is_left_in_the_package(path: Path) -> None:
    modules = {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    assert not modules & set(OLD_MODULES)
    assert not {name.strip("_") for name in identifiers(path)} & set(OLD_IDENTIFIERS)


@pytest.mark.parametrize("package", ["mpicomm", "benchmarks", "examples", "tests"])
def test_names_are_plain_technical_english(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert [f"{path}: {name}" for path in paths for name in identifiers(path) if IDIOM.search(name)] == []


def test_no_old_setting_or_word_is_left_in_any_text() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [path for path in map(Path, listed) if path.suffix in TEXT and "results" not in path.parts]
    assert len(paths) > 200
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        if path.name != Path(__file__).name and (ROOT / path).is_file()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        for word in OLD_WORDS
        if re.search(word, line)
    ]
    assert found == []


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
