"""The table of launchers' variables in docs/reference.md matches the package's tables."""

from __future__ import annotations

import dataclasses

import mpicomm
from tests.docs import launcher_table
from tests.docs.documents import REFERENCE


def test_the_reference_has_the_table() -> None:
    reference = REFERENCE.read_text()
    assert reference == launcher_table.inserted(reference), "python -m tests.docs.launcher_table --write"


def test_its_rows_are_fields_of_a_world() -> None:
    fields = {field.name for field in dataclasses.fields(mpicomm.World)}
    assert set(launcher_table.FACTS.values()) <= fields


def test_it_has_all_variables() -> None:
    table = launcher_table.text()
    for launcher in launcher_table.COLUMNS.values():
        assert [variable for variable in launcher.variables() if f"`{variable}`" not in table] == []
