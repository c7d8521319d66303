"""Skips the modules whose packages are not installed; starts the jobs and records them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import records
from tests.integrations.records import Recorder
from tests.launching import Outcome, command_line, run_command

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of a module, one integration, if one of its `PACKAGES` is not installed; and the long tests."""
    runs_all = any(isinstance(plugin, Recorder) for plugin in config.pluginmanager.get_plugins())
    for item in items:
        if _HERE not in item.path.parents:
            continue
        if missing := [name for name in item.module.PACKAGES if records.version(name) is None]:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}: run `make integrations`"))
        elif item.get_closest_marker("make_integrations") and not runs_all:
            item.add_marker(pytest.mark.skip(reason="long: run `make integrations`"))


@pytest.fixture
def run(record_property: Callable[[str, Any], None]) -> Callable[..., Outcome]:
    """Run a command of a shell in the environment of `run_command`, record it, and require that it succeeds.

    The fixture returns a function with the arguments of `run_command`, but with the command as text, such as
    `mpirun -n 4 python -m mpicomm.examples.p2p`, and `finds`: figures to record, by name, as a function of the outcome.
    """

    def run_and_record(
        command: str, finds: Callable[[Outcome], dict[str, Any]] | None = None, **options: Any
    ) -> Outcome:
        outcome = run_command(command_line(command), **options)
        found = finds(outcome) if finds and outcome.status == 0 else {}
        job = {"command": command, "status": outcome.status, "seconds": round(outcome.seconds, 1), "found": found}
        record_property(records.JOB, job)  # a dict of plain values, which pytest-xdist can send
        assert outcome.status == 0, outcome
        return outcome

    return run_and_record
