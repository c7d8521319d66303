"""The result files show messages and names that the code still has."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator

import pytest

from tests.failures.__main__ import MPI4PY
from tests.launching import ROOT
from tests.mutants.table import MUTANTS

VALUE = "?"  # stands for a number, a name, a path, a dtype and other values
RESULTS = ROOT / "docs" / "results"


def words_of(text: str) -> list[str]:
    """Return the words of a message without punctuation; VALUE stands for the values in it."""
    words = (word.strip(".,:;\"'") for word in text.split())
    return [VALUE if word == "host" or re.search(r"[^a-z'-]", word) else word for word in words if word]


def templates() -> Iterator[str]:
    """Yield the texts in the package, with VALUE in place of the expressions of f-strings."""
    for path in (ROOT / "mpicomm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)


@pytest.fixture(scope="module")
def known() -> set[tuple[str, ...]]:
    """Return the pairs of words in the texts of the package, and the texts of one word."""
    pairs: set[tuple[str, ...]] = set()
    for text in templates():
        words = words_of(text)
        pairs |= set(itertools.pairwise(words)) if len(words) > 1 else {tuple(words)}
    return pairs


def unknown_words(message: str, known: set[tuple[str, ...]]) -> list[str]:
    """Return the words that no text of the package has beside one of their neighbours.

    A message may consist of several texts; a word alone, such as the name of an operation, may be one of them.
    """
    words = [VALUE, *words_of(message), VALUE]
    return [
        word
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
        if word != VALUE and known.isdisjoint({(before, word), (word, after), (word,)})
    ]


def test_the_messages_of_faults_are_those_of_the_package(known: set[tuple[str, ...]]) -> None:
    tables = json.loads(MPI4PY.read_text())
    lines = {line for table in tables for row in table["rows"] for line in row["with"]["lines"]}
    assert lines
    assert {line: words for line in sorted(lines) if (words := unknown_words(line, known))} == {}


def test_a_message_of_another_version_is_found(known: set[tuple[str, ...]]) -> None:
    assert unknown_words("[mpicomm] the job stands still: rank 3 has waited 3 s.", known) == ["stands", "still"]


def test_the_mutants_with_results_and_their_tests_exist() -> None:
    rows = json.loads((RESULTS / "mutants.json").read_text())["mutants"]
    assert {(row["place"], row["fault"]) for row in rows} <= {(mutant.place, mutant.fault) for mutant in MUTANTS}
    for row in rows:
        if test := re.match(r"(\S+\.py)::(?:\w+::)*(\w+)", row["by"]):  # not if the tests crashed or hung
            # defined there, or imported from another module, whose tests it repeats
            assert re.search(rf"\b{test[2]}\b", (ROOT / test[1]).read_text()), row
