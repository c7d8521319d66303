"""The output of the examples that train on the images of digits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mpicomm.examples import ddp
from tests.launching import Outcome


def run_example(run: Callable[..., Outcome], command: str, about: str, **options: Any) -> None:
    """Run an example, and check that it learns and prints what it is about: its kind of parallelism and its ranks."""
    outcome = run(command, accuracy, **options)
    assert accuracy(outcome)["accuracy, %"] >= 100 * ddp.GOAL, outcome
    assert "parameters identical on all ranks" in outcome.stdout, outcome
    backend = "gloo" if "torchrun" in command else "mpicomm"
    assert f"{about}, backend {backend}\n" in outcome.stdout, outcome


def accuracy(outcome: Outcome) -> dict[str, float]:
    """Return the accuracy in percent that an example has printed."""
    found = re.search(r"^test accuracy ([\d.]+)% of 360 images$", outcome.stdout, re.MULTILINE)
    assert found is not None, outcome
    return {"accuracy, %": float(found[1])}
