"""The test that has started a job, which the processes of the job inherit."""

from __future__ import annotations

import os

VARIABLE = "TESTS_NAME"
"""The variable with the ID of the test, or of the fixture, that has started a job."""


def name() -> str:
    """Return the ID of the test or fixture that runs in this process or has started it; empty outside of tests."""
    running = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]  # "<ID> (call)"
    return os.environ.get(VARIABLE, "") or running
