"""A plugin of pytest: only the tests listed here run a second time if they fail. Every entry is work to be done.

Tests marked `mpi` cannot be entries: the ranks would have to agree on the repetition.
"""

from __future__ import annotations

import dataclasses

import pytest

MOST = 5
"""The maximum number of entries."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A test that fails now and then."""

    test: str
    """The beginning of its ID."""

    since: str
    """The date of the entry."""

    cause: str
    """The cause, as far as it is known."""


ENTRIES = [
    Entry(
        "tests/cluster/test_slurm.py::test_array_job",
        "2026-11-27",
        "slurmstepd 22.05 once reported that the TaskProlog, whose output it had read, did not exit normally, and "
        "ended the step; nothing of mpicomm runs before it",
    ),
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("rerunfailures"):  # environments of other versions lack it
        return
    for item in items:
        if any(item.nodeid.startswith(entry.test) for entry in ENTRIES):
            item.add_marker(pytest.mark.flaky(reruns=1))
