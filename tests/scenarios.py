"""A plugin of pytest: `--scenarios chosen` deselects the tests that start jobs and are not chosen for `make test`.

tests/scenarios.json has the choice, which `python -m tests.mutants.scenarios choose` writes. A test that is not in
that file runs. The files whose jobs take the longest run first, so that parallel processes end at about the same time.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from mpicomm.reports import result_files

_FILE = Path(__file__).with_name("scenarios.json")

KEPT = {
    "tests/examples/test_readme.py::test_a_command_of_the_readme": "every command of the README is run",
    "tests/examples/test_quick_start.py": "every command of the README is run",
    "tests/launch/test_pytest_plugin.py": "the tests of all ranks depend on the plugin",
    "tests/cluster/test_slurm.py": "srun starts the ranks, with PMIx and PMI-2",
    "tests/cluster/test_hierarchical.py": "collectives between nodes",
    "tests/cluster/test_pals.py::test_ranks_on_two_hosts": "PALS's mpiexec starts ranks on several hosts",
    "tests/cluster/test_mpirun.py": "mpirun starts ranks on several hosts, with different networks",
}
"""Scenarios that are chosen whatever they detect, by the beginning of their ID, and the reason."""

_LEFT_OUT = (
    "tests/cluster/",
    "tests/training/test_data_product.py::test_whole_product",  # starts thousands of DataLoader workers
    # These use the jobs of other tests, and start them if those do not run.
    "tests/examples/test_examples.py::test_a_script_for_horovod",
    "tests/examples/test_examples.py::test_existing_script",
)
"""The beginnings of the IDs of scenarios that are not in the file, and are not chosen unless `KEPT` has them."""


def reason_to_keep(test: str) -> str | None:
    """Return why a scenario is chosen whatever it detects."""
    return next((reason for start, reason in KEPT.items() if test.startswith(start)), None)


def write(chosen: dict[str, float], others: list[str]) -> None:
    """Write the choice, and the seconds that each chosen scenario takes."""
    result_files.write(_FILE, {"chosen": chosen, "others": others})


def chosen() -> dict[str, float]:
    """Return the chosen scenarios, and the seconds that each takes."""
    return dict(json.loads(_FILE.read_text())["chosen"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--scenarios", choices=["all", "chosen"], default="all", help="which tests that start jobs run (default: all)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--scenarios") == "all":
        return
    others = set(json.loads(_FILE.read_text())["others"])
    left_out = {item for item in items if _is_left_out(item.nodeid, others)}
    config.hook.pytest_deselected(items=list(left_out))
    left = [item for item in items if item not in left_out]
    seconds = _seconds_of_files()
    items[:] = sorted(left, key=lambda item: -seconds[_file_of(item.nodeid)])


def _seconds_of_files() -> dict[str, float]:
    seconds: dict[str, float] = collections.defaultdict(float)
    for test, duration in chosen().items():
        seconds[_file_of(test)] += duration
    return seconds


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _is_left_out(test: str, others: set[str]) -> bool:
    return test in others or (test.startswith(_LEFT_OUT) and not reason_to_keep(test))
