"""Every mutant can be applied to the package as it is now; what identifies a place in the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import ROOT
from tests.mutants import scenarios, syntax
from tests.mutants.mutant import Mutant
from tests.mutants.run import read_sources
from tests.mutants.table import MUTANTS

SOURCE = """
def call(x):
    # A comment.
    if x > (
        0
    ):
        first(x); second(x)
    elif x:
        x.field = 1
    try:
        second(x)
    except (OSError,
            ValueError) as error:  # the reason
        raise
    return x and "é" and done


class Call:
    @property
    def done(self):
        return call(1)

    @done.setter
    def done(self, value):
        self.value = value
"""


def _problem(mutant: Mutant, package: list[syntax.Module]) -> str:
    try:
        faulty = mutant.applied_to(package)
        if faulty.path.suffix == ".py":
            compile(faulty.source, faulty.path, "exec")
    except (SyntaxError, ValueError) as error:
        return f"{mutant.place}: {mutant.fault}\n{error}"
    return ""


def test_every_mutant_can_be_applied() -> None:
    package = read_sources(ROOT)
    assert [problem for mutant in MUTANTS if (problem := _problem(mutant, package))] == []
    assert len({(mutant.place, mutant.fault) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_equivalent_mutation_changes_code_that_exists() -> None:
    for entry in json.loads((ROOT / "tests/mutants/generated/equivalent.json").read_text()):
        path = ROOT / "mpicomm" / f"{entry['module'].replace('.', '/')}.py"
        text = " ".join(map(str.strip, path.read_text().splitlines()))
        assert entry["change"] == "*" or entry["change"].partition(" -> ")[0] in text, entry
        assert entry["reason"]


@pytest.fixture
def package(tmp_path: Path) -> list[syntax.Module]:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "module.py").write_text(SOURCE)
    (folder / "text.j2").write_text("trap : TERM\n{{ x }}{{ x }}\n")
    return syntax.read_package(folder)


@pytest.mark.parametrize(
    ("place", "old", "new", "expected"),
    [
        ("call", "x > 0", "True", "    if True:"),
        ("package.module.call", "done", "x or y", '    return x and "é" and (x or y)'),
        ("call", "x.field", "y", "        y = 1"),
        ("call", "if x > 0:", "if False:", "    if False:"),
        ("call", "elif x:", "elif y:", "    elif y:"),
        ("call", "except (OSError, ValueError) as error:", "except OSError:", "    except OSError:"),
        ("call", "first(x)", "", "        pass; second(x)"),
        ("call", "first(x)\nsecond(x)", "third()", "        third()"),
        ("Call.done", "self.value = value", "", "        pass"),
        ("module", "@property\ndef done(self):", "def done(x):", "    def done(x):"),
    ],
)
def test_code_is_identified_by_its_syntax(
    place: str, old: str, new: str, expected: str, package: list[syntax.Module]
) -> None:
    replaced = syntax.replace(package, place, old, new)
    compile(replaced.source, "replaced", "exec")
    assert set(replaced.source.split("\n")) - set(SOURCE.split("\n")) == {expected}


@pytest.mark.parametrize(
    ("place", "old", "count"), [("call", "second(x)", 2), ("call", "third(x)", 0), ("all", "x", 0), ("ll", "x > 0", 0)]
)
def test_code_that_does_not_occur_once_is_an_error(
    place: str, old: str, count: int, package: list[syntax.Module]
) -> None:
    with pytest.raises(ValueError, match=rf"{place}: expected this code once, found it {count} times"):
        syntax.replace(package, place, old, "")


def test_a_template_is_replaced_as_text(package: list[syntax.Module]) -> None:
    replaced = syntax.replace(package, "text.j2", "TERM", "INT")
    assert (replaced.path.name, replaced.source) == ("text.j2", "trap : INT\n{{ x }}{{ x }}\n")
    assert syntax.statement(package, "text.j2", "TERM", "INT") is None
    with pytest.raises(ValueError, match=r"text.j2: expected this code once, found it 2 times"):
        syntax.replace(package, "text.j2", "{{ x }}", "")


@pytest.mark.parametrize(
    ("place", "old", "line"),
    [
        ("call", "x > 0", 4),
        ("call", "x.field = 1", 9),
        ("call", "elif x:", 4),  # a statement cannot be inserted between `if` and `elif`
        ("call", "except (OSError, ValueError) as error:", 10),
        ("call", "def call(x):", 4),
    ],
)
def test_a_mark_precedes_the_statement_with_the_code(
    place: str, old: str, line: int, package: list[syntax.Module]
) -> None:
    position = syntax.statement(package, place, old, "x")
    assert position[1] == line


def test_code_outside_of_functions_is_executed_by_every_test(package: list[syntax.Module]) -> None:
    assert syntax.statement(package, "Call", "property", "staticmethod") is None


def test_the_choice_detects_every_mutant_in_little_time() -> None:
    detects = {"slow": {"a", "b", "c"}, "fast": {"a", "b"}, "last": {"c"}, "kept": {"d"}, "unused": {"a"}}
    seconds = {"slow": 100.0, "fast": 1.0, "last": 2.0, "kept": 50.0, "unused": 1.0}
    assert scenarios.cover(detects, seconds, kept=["kept"]) == ["kept", "fast", "last"]
