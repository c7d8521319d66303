"""Training runs whose ranks are killed, and their comparison with runs in which no rank is killed."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.launching import Outcome, python, run_within
from tests.recovery import kill_plan
from tests.recovery.kill_plan import RECOVERING, Kill
from tests.time_limits import scaled
from tests.training.job import SAMPLES

RANKS = 4
LIMIT = 150.0  # seconds for one job: many times its usual duration
_SHARED_MEMORY = Path("/dev/shm")
_MODULE = "tests.recovery.training_job"
_NOT_STARTED = "The PMIx server's listener thread failed to start."  # in one of some hundred starts of mpirun


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, and the kills in it."""

    name: str
    kills: tuple[Kill, ...]
    spares: int = 0
    arguments: tuple[str, ...] = ()


@dataclasses.dataclass
class Result:
    """The result of a case."""

    case: Case
    directory: Path
    seconds: float
    gaps: list[float]
    """Seconds from each kill to the next step that was completed in a later world, for the kills that have one."""

    points: list[str]
    """The points at which ranks were killed."""

    problems: list[str]
    sizes: list[int] = dataclasses.field(default_factory=list)
    """The number of ranks of each world that completed a step."""

    starts: list[int] = dataclasses.field(default_factory=list)
    """The number of complete steps at the start of each of these worlds."""


def run(case: Case, directory: Path) -> Result:
    """Run a case, and check all that can be checked without a reference."""
    directory.mkdir()
    arguments = [str(directory), "--kills", kill_plan.to_text(case.kills), *case.arguments]
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as segments:
        outcome = launched(RANKS, case.spares, arguments, segments)
        left = sorted(path.name for path in Path(segments).iterdir())
    result = Result(case, directory, outcome.seconds, [], [], [])
    if outcome.status is None:
        result.problems.append(f"timed out after {outcome.seconds:.0f} s")
    elif outcome.status:
        result.problems.append(f"ended with status {outcome.status}")
    if outcome.left:
        result.problems.append(f"left processes behind: {outcome.left}")
    if left:
        result.problems.append(f"left files in {_SHARED_MEMORY}: {left}")
    Path(directory, "output.txt").write_text(str(outcome))
    killed = list(kill_plan.killed(directory))
    result.points = [each["point"] for each in killed]
    if len(killed) < len(case.kills):
        result.problems.append(f"killed {len(killed)} of {len(case.kills)} ranks")
    _read_steps(result, killed)
    return result


def launched(ranks: int, spares: int, arguments: Sequence[str], segments: str = str(_SHARED_MEMORY)) -> Outcome:
    """Run a job.

    Args:
        segments: The directory of MPI's shared memory. mpicomm's own has no name.
    """
    more = ["--spares", str(spares)] if spares else ["--fault-tolerant"]
    more += ["--env", f"OMPI_MCA_btl_sm_backing_directory={segments}"]
    command = ["-m", "mpicomm", "run", "-n", str(ranks + spares), *more, *python(["-m", _MODULE, *arguments])]
    outcome = run_within(scaled(LIMIT), python(command))
    if _NOT_STARTED in outcome.stderr:
        outcome = run_within(scaled(LIMIT), python(command))
    return outcome


def _read_steps(result: Result, killed: Sequence[Mapping[str, Any]]) -> None:
    """Compute the gaps, and check that each epoch takes each sample once."""
    logs = [each for path in result.directory.glob("steps-*.jsonl") for each in entries(path)]
    ends = [each for each in logs if each["what"] == "end"]
    for kill in killed:
        later = [each["time"] for each in ends if each["world"] > kill["world"] and each["time"] > kill["time"]]
        if later:
            result.gaps.append(min(later) - kill["time"])
    # The world that completed a step is the last one that began it.
    begins = [each for each in logs if each["what"] == "begin"]
    completed_by: dict[int, int] = {}
    for each in begins:
        completed_by[each["step"]] = max(completed_by.get(each["step"], 0), each["world"])
    worlds = sorted({each["world"] for each in begins})
    starts = [min(each["step"] for each in begins if each["world"] == world) - 1 for world in worlds]
    for number, world in enumerate(worlds):
        if starts[number] not in starts[number + 1 :]:  # otherwise this world completed no step
            result.sizes.append(len({each["rank"] for each in begins if each["world"] == world}))
            result.starts.append(starts[number])
    taken: dict[int, collections.Counter[int]] = {}
    for each in begins:
        if each["world"] == completed_by[each["step"]]:
            taken.setdefault(each["epoch"], collections.Counter()).update(each["indices"])
    for epoch, counts in sorted(taken.items()):
        if counts != collections.Counter(range(SAMPLES)):
            result.problems.append(f"epoch {epoch} took {len(counts)} of {SAMPLES} samples, {counts.total()} in all")


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log; the last line of a killed process may be incomplete."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


# -- references --------------------------------------------------------------------------------------------------------


class References:
    """Runs in which no rank is killed: a whole one, and runs that continue from its checkpoints on fewer ranks."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        self._folder = folder
        self._folder.mkdir()
        self._arguments = arguments

    @functools.cached_property
    def whole(self) -> Path:
        """The directory of the whole run, which keeps a checkpoint of each step."""
        directory = self._folder / "whole"
        directory.mkdir()
        self._run(RANKS, [str(directory), "--save-every", "1", "--keep", "10000", "--pause", "0", *self._arguments])
        return directory

    def compare(self, results: Sequence[Result]) -> None:
        """Add a problem to each result whose final state differs from its reference."""
        with_same_size = [each for each in results if each.case.spares]
        for result in with_same_size:
            _compare(result, self.whole, ("digest", "history", "evaluation", "callbacks", "predicted"))
        self._compare_chains([each for each in results if not each.case.spares])

    def _compare_chains(self, results: Sequence[Result]) -> None:
        """Compare runs that continued on fewer ranks: one job for all of them in each number of ranks.

        A chain is the worlds of a run, (size, first complete step), such as ((4, 0), (3, 7), (2, 12)).
        """
        results = [each for each in results if each.sizes]  # the others completed no step, and have a problem
        chains = {id(each): tuple(zip(each.sizes, each.starts, strict=True)) for each in results}
        made: dict[Any, Path] = {((RANKS, 0),): self.whole}
        for length in range(1, max(map(len, chains.values()), default=1) + 1):
            wanted = sorted({chain[:length] for chain in chains.values() if len(chain) >= length} - made.keys())
            for size in sorted({chain[-1][0] for chain in wanted}):
                names = []
                for chain in [each for each in wanted if each[-1][0] == size]:
                    name = "-".join(f"{ranks}x{step}" for ranks, step in chain)
                    made[chain] = self._folder / name
                    _take_checkpoint(made.get(chain[:-1], self.whole), made[chain], chain[-1][1])
                    names.append(name)
                options = ["--save-every", "1", "--keep", "10000", "--pause", "0", *self._arguments]
                self._run(size, [str(self._folder), "--from", ",".join(names), *options])
        for result in results:
            _compare(result, made[chains[id(result)]], ("digest",))

    def _run(self, ranks: int, arguments: Sequence[str]) -> None:
        outcome = launched(ranks, 0, arguments)
        assert outcome.status == 0, outcome


def _take_checkpoint(source: Path, target: Path, step: int) -> None:
    """Copy the checkpoint of a step of one run into the directory of another run."""
    (target / "run").mkdir(parents=True)
    if step:
        (found,) = (source / "run").glob(f"step-{step:09d}")
        shutil.copytree(found, target / "run" / found.name)


def _compare(result: Result, reference: Path, names: Sequence[str]) -> None:
    expected = json.loads((reference / "final-0.json").read_text())
    finals = sorted(result.directory.glob("final-*.json"))
    survivors = result.sizes[-1] if result.sizes else RANKS
    late = [point for point in result.points if point in ("after fit", "after the last step")]
    if len(finals) < survivors - len(late):
        result.problems.append(f"{len(finals)} of {survivors} ranks completed the run")
    for path in finals:
        found = json.loads(path.read_text())
        different = [name for name in names if found[name] != expected[name]]
        result.problems += [f"{path.name}: {name} differs from {reference.name}" for name in different]


def compare(results: Sequence[Result], folder: Path) -> None:
    """Compare the final states of all results with runs in which no rank is killed."""
    for arguments in sorted({each.case.arguments for each in results}):
        name = "-".join(["references", *arguments]).replace("--", "")
        References(folder / name, arguments).compare([each for each in results if each.case.arguments == arguments])


# -- cases -------------------------------------------------------------------------------------------------------------


def cases(count: int, seed: int) -> list[Case]:
    """Return cases with `count` kills in all: each point in turn, with and without spares."""
    chance = random.Random(seed)
    found: list[Case] = []
    makers = [_rank_0, _two_at_once, _in_the_recovery, _with_workers]
    while sum(len(case.kills) for case in found) < count:
        number = len(found)
        spares = number % 2
        if number % 3 == 2:
            found.append(makers[number // 3 % len(makers)](chance, spares))
            continue
        # Two or three kills in one job, in the worlds that follow each other.
        chosen = [kill_plan.POINTS[(number + step) % len(kill_plan.POINTS)] for step in range(2 + spares)]
        chosen.sort(key=_order)
        sizes = [RANKS] * len(chosen) if spares else [RANKS - world for world in range(len(chosen))]
        found.append(Case(", ".join(chosen), tuple(kill_plan.drawn(chance, chosen, sizes)), spares * len(chosen)))
    return found


def _order(point: str) -> int:
    """Return the order of points in a run: those at its start first, those at its end last."""
    if point.startswith("before the"):
        return 0
    return 2 if point.startswith("after") else 1


def _rank_0(chance: random.Random, spares: int) -> Case:
    point = chance.choice(["at a random moment", "in a 64 MiB all_reduce", "in an evaluation"])
    return Case(f"rank 0 {point}", (kill_plan.kill_at(chance, point, 0, 0),), spares)


def _two_at_once(chance: random.Random, spares: int) -> Case:
    first, second = chance.sample(range(RANKS), 2)
    kill = kill_plan.kill_at(chance, "at a random moment", 0, first)
    return Case("two at once", (kill, dataclasses.replace(kill, rank=second)), 2 * spares)


def _in_the_recovery(chance: random.Random, spares: int) -> Case:
    first, second = chance.sample(range(RANKS), 2)
    kills = (
        kill_plan.kill_at(chance, "at a random moment", 0, first),
        kill_plan.kill_at(chance, RECOVERING, 0, second),
    )
    return Case("one, and another one during the recovery", kills, 2 * spares)


def _with_workers(chance: random.Random, spares: int) -> Case:
    kill = kill_plan.kill_at(chance, "at a random moment", 0, chance.randrange(RANKS))
    return Case("with DataLoader workers", (kill,), spares, ("--workers", "1"))
