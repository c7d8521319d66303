"""A few of the kills of `python -m tests.recovery`, with its checks: a run ends with the bits of its reference."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.recovery import killed_runs
from tests.recovery.kill_plan import RECOVERING, Kill
from tests.recovery.killed_runs import Case, References
from tests.recovery.training_job import EPOCHS

# The case, the number of kills that a completed step follows, and the number of ranks of each world that completed a
# step, which is not known if it depends on the moment of the kill.
CASES: list[tuple[Case, int, list[int] | None]] = [
    (Case("on fewer ranks", (Kill(0, 0, "in a barrier", 2, 0.01),)), 1, [4, 3]),
    (
        Case("with spares", (Kill(0, 0, "while a checkpoint is written"), Kill(1, 1, "after fit")), spares=2),
        1,
        None,
    ),
    (
        Case(
            "with spares, also in a recovery",
            (
                Kill(0, 2, "at a random moment", delay=0.2),
                Kill(0, 0, RECOVERING, delay=0.02),
                Kill(1, 0, "while a checkpoint is written"),
                Kill(2, 1, "after fit"),
            ),
            spares=4,
        ),
        3,
        None,
    ),
    (
        Case(
            "sharded, with copies of the shards",
            (Kill(0, 1, "in a 64 MiB all_reduce", 7, 0.01),),
            spares=1,
            arguments=("--strategy", "fsdp", "--replicate"),
        ),
        1,
        [4, 4],
    ),
]


@pytest.fixture(name="references", scope="module")
def _references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], References]:
    """Return a function from the arguments of a case to the runs without kills; cases with equal ones share them."""
    folder = tmp_path_factory.mktemp("references")
    return functools.cache(lambda arguments: References(folder / "-".join(["of", *arguments]), arguments))


@pytest.mark.skipif(mpi.library().vendor != "Open MPI", reason="requires an MPI that continues after a failure (ULFM)")
@pytest.mark.parametrize(
    ("case", "gaps", "sizes"), [pytest.param(*row, id=row[0].name.replace(" ", "-")) for row in CASES]
)
def test_a_killed_run_ends_with_the_bits_of_a_run_without_kills(
    case: Case, gaps: int, sizes: list[int] | None, references: Callable[[tuple[str, ...]], References], tmp_path: Path
) -> None:
    result = killed_runs.run(case, tmp_path / "run")
    references(case.arguments).compare([result])
    assert result.problems == []
    assert len(result.gaps) == gaps  # no step follows the kill after fit
    assert sizes in (None, result.sizes)
    assert_logged(tmp_path / "run" / "run" / "metrics.jsonl")


def assert_logged(path: Path) -> None:
    """Check that the values logged on all ranks have the means of the losses, which are equal to them."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries = [entry for entry in entries if entry["event"] == "step" and entry["loss"] is not None]
    assert len(entries) > EPOCHS // 2  # rank 0 can die before it writes an entry
    assert {name for entry in entries for name in entry if name.startswith("of_")} >= {"of_0", "of_1"}
    assert all(entry["of_0"] == 1.0 for entry in entries)
    # A rank that dies is the only one that knows its losses since the last reduction, so both means lack them.
    assert [entry["own_loss"] for entry in entries] == [pytest.approx(entry["loss"]) for entry in entries]
