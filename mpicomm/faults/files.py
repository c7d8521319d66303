"""The files that a rank leaves of its last operations and its stacks, when the job ends badly or is asked to."""

from __future__ import annotations

import faulthandler
import json
import os
import time
from pathlib import Path
from typing import Any

from mpicomm.faults import recorder


def write(directory: str | os.PathLike[str], rank: int, about: dict[str, Any]) -> Path:
    """Write `rank-<rank>.json` with the recorded operations, and `rank-<rank>.stacks.txt` with all threads' stacks.

    Args:
        about: What else the file is to say.

    Returns:
        The path of the former.

    Raises:
        OSError: If the directory or the files cannot be written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    now, wall = time.monotonic(), time.time()
    operations = [
        {"number": each.number, **each.describe(now), **_times(each, now, wall)} for each in recorder.recorded()
    ]
    path = folder / f"rank-{rank}.json"
    with path.open("w") as file:
        json.dump({"rank": rank, **about, "written": wall, "operations": operations}, file, indent=1)
    with (folder / f"rank-{rank}.stacks.txt").open("w") as file:
        faulthandler.dump_traceback(file)
    return path


def _times(operation: recorder.Operation, now: float, wall: float) -> dict[str, float | None]:
    """Return the moments of an operation in seconds since the epoch."""
    moments = {"called": operation.called, "start": operation.start, "end": operation.end}
    return {name: None if moment is None else wall - (now - moment) for name, moment in moments.items()}
