"""The list of tests that may be repeated is short, and names existing tests."""

from __future__ import annotations

import datetime

from tests import quarantine
from tests.launching import ROOT


def test_the_list_is_short_and_each_entry_is_of_an_existing_test() -> None:
    assert len(quarantine.ENTRIES) <= quarantine.MOST
    for entry in quarantine.ENTRIES:
        file, _, name = entry.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
        assert not file.startswith(("tests/mpi", "tests/collective_ops", "tests/features", "tests/training"))
        assert datetime.date.fromisoformat(entry.since)
        assert entry.cause
