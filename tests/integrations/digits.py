"""The output of the examples that train on the images of digits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mpicomm.examples import ddp
from tests.launching import Outcome


def run_example(run: Callable[..., Outcome], command: str, about: str, **options: Any) -> None:
    """Run an example, and check that it learns and prints what it is about: its kind of parallelism and its ranks."""
    outcome = run(command, _figures, **options)
    backend = "gloo" if "torchrun" in command else "mpicomm"
    assert f"{about}, backend {backend}\n" in outcome.stdout, outcome


def _figures(outcome: Outcome) -> dict[str, Any]:
    """Return the accuracy in percent that an example has printed, after a check of its output."""
    found = re.search(r"^test accuracy ([\d.]+)% of 360 images$", outcome.stdout, re.MULTILINE)
    assert found is not None, outcome
    assert float(found[1]) >= 100 * ddp.GOAL, outcome
    assert "parameters identical on all ranks" in outcome.stdout, outcome
    return {"accuracy, %": float(found[1])}
