"""Ten kills in one run of the digits example, with ten spares: the same bits as without kills."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.launching import Outcome, python, run_within
from tests.recovery.killed_runs import RANKS
from tests.time_limits import scaled

KILLS = 10
STEPS = 144  # of the example on four ranks
LIMIT = 300.0


def run(folder: Path) -> list[str]:
    """Run the example with and without kills, and return what differs."""
    problems = []
    kills = [str((number + 1) * STEPS // (KILLS + 1)) for number in range(KILLS)]
    runs = {"whole": _launched(folder / "whole", 0, ["--recover"])}
    runs["killed"] = _launched(folder / "killed", KILLS, ["--recover", "--kill", *kills])
    for name, outcome in runs.items():
        (folder / f"{name}.txt").write_text(str(outcome))
        if outcome.status != 0 or outcome.left:
            problems.append(f"the {name} run ended with status {outcome.status}, left {outcome.left}; see {folder}")
    if problems:
        return problems
    happened = runs["killed"].stdout.count("without a step")
    if happened != KILLS:
        problems.append(f"the run recovered {happened} times from {KILLS} kills; see {folder}")
    expected, found = (_last_checkpoint(folder / name) for name in ("whole", "killed"))
    return problems + [f"{name} differs; see {folder}" for name in _differences(expected, found)]


def _launched(directory: Path, spares: int, arguments: Sequence[str]) -> Outcome:
    more = ["--spares", str(spares)] if spares else ["--fault-tolerant"]
    program = ["-m", "mpicomm.examples.trainer", "--dir", str(directory), *arguments]
    command = ["-m", "mpicomm", "run", "-n", str(RANKS + spares), *more, *python(program)]
    return run_within(scaled(LIMIT), python(command))


def _last_checkpoint(directory: Path) -> dict[str, Any]:
    """Return the tensors and the history of the last checkpoint, by name."""
    path = max(directory.glob("step-*/COMPLETE")).parent
    dcp_to_torch_save(path, directory / "whole.pt")
    content = torch.load(directory / "whole.pt", weights_only=False)
    found = {f"model.{name}": value for name, value in content["model"].items()}
    for name, values in content["optimizer"]["state"].items():
        found |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return {**found, "history": pickle.loads(content["object.run"])["position"]["history"]}


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [name for name in expected | found if not _is_equal(expected.get(name), found.get(name))]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
