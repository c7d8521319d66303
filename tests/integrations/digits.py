"""The output of the examples that train on the images of digits."""

from __future__ import annotations

import re
from typing import Any

from mpicomm.examples import ddp
from tests.launching import Outcome


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the accuracy in percent that an example has printed, after a check of its output."""
    found = re.search(r"^test accuracy ([\d.]+)% of 360 images$", outcome.stdout, re.MULTILINE)
    assert found is not None, outcome
    assert float(found[1]) >= 100 * ddp.GOAL, outcome
    assert "parameters identical on all ranks" in outcome.stdout, outcome
    return {"accuracy, %": float(found[1])}
