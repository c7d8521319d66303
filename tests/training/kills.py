"""Training runs that are killed repeatedly, and the comparison of their final state with an uninterrupted run."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.launching import Job, background_job, on_ranks, run_command
from tests.training.job import POINTS


@dataclasses.dataclass
class Chain:
    """A run that was killed `kills` times before it completed."""

    what: str
    kills: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def newest(directory: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    marks = sorted(directory.glob("step-*/COMPLETE"))
    return json.loads(marks[-1].read_text())["step"] if marks else 0


def command(directory: Path, ranks: int, *arguments: str) -> list[str]:
    return on_ranks(ranks, ["-m", "tests.training.job", str(directory), *arguments])


def pids(job: Job) -> list[int]:
    """Wait until the ranks have printed their pids, at the start of the training, and return them."""
    line = job.wait_until(lambda: re.search(r"pids (.*)\n", job.stdout()), "the ranks have printed their pids")
    return [int(pid) for pid in re.findall(r"\d+", line[1])]


def starts(directory: Path) -> list[int]:
    """Return the steps from which a run started or resumed, for the starts that recorded it in the metrics file."""
    path = directory / "metrics.jsonl"
    entries = [json.loads(line) for line in whole_lines(path)] if path.exists() else []
    return [entry["step"] for entry in entries if entry["event"] in ("start", "resume")]


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a metrics file, whose last line may be truncated."""
    lines = path.read_text().split("\n")
    return [line for line in lines[:-1] if line.endswith("}")]


def final(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("final-*.json"))]


def run_to_the_end(directory: Path, ranks: int, *arguments: str) -> None:
    outcome = run_command(command(directory, ranks, *arguments))
    assert outcome.status == 0, outcome


def at_a_point(point: str) -> Callable[[Path, int, random.Random], None]:
    """Return a function that starts a run and has it killed at one of its next checkpoints."""

    def kill(directory: Path, ranks: int, chance: random.Random) -> None:
        # The marker of an old checkpoint is removed only if there are more checkpoints than `keep_checkpoints`.
        number = chance.randint(3, 4) if point == "removing" else chance.randint(1, 3)
        outcome = run_command(command(directory, ranks, "--kill", f"{point}:{number}"))
        assert outcome.status != 0, "was not killed"

    return kill


def at_a_moment(directory: Path, ranks: int, chance: random.Random) -> None:
    """Start a run, and kill it at a random moment of its training."""
    with background_job(command(directory, ranks, "--pause", "0.02")) as job:
        started = pids(job)
        time.sleep(chance.uniform(0.0, 1.6))
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        job.finish()


def chains(folder: str, each: int, moments: int, ranks: int, seed: int) -> Iterator[Chain]:
    """Kill runs, resume them until they complete, and compare them with a run that was never killed.

    Args:
        folder: The directory of the runs; runs without problems are removed from it.
        each: The number of kills at each point of saving.
        moments: The number of kills at random moments.
    """
    chance = random.Random(seed)
    whole = Path(folder, "whole")
    whole.mkdir()
    run_to_the_end(whole, ranks)
    expected = final(whole)
    ways = [(point, each, at_a_point(point)) for point in POINTS] + [("a random moment", moments, at_a_moment)]
    for name, kills, kill in ways:
        number = 0
        while number < kills:
            directory = Path(folder, f"{name}-{number}".replace(" ", "-"))
            directory.mkdir()
            chain = Chain(name)
            _run_chain(chain, directory, ranks, min(3, kills - number), kill, chance)
            if final(directory) != expected:
                chain.problems.append(f"its end is another one than without kills: {directory}")
            if not chain.problems:
                shutil.rmtree(directory)
            number += max(chain.kills, 1)
            yield chain
    shutil.rmtree(whole)


def _run_chain(
    chain: Chain,
    directory: Path,
    ranks: int,
    kills: int,
    kill: Callable[[Path, int, random.Random], None],
    chance: random.Random,
) -> None:
    for number in range(kills + 1):
        complete, before = newest(directory), len(starts(directory))
        if number < kills:
            kill(directory, ranks, chance)
            chain.kills += 1
        else:
            run_to_the_end(directory, ranks)
        wrong = [step for step in starts(directory)[before:] if step != complete]
        if wrong:
            chain.problems.append(f"went on from step {wrong[0]}, where {complete} was complete")
        if len(final(directory)) == ranks:  # a kill can occur after only some ranks have written their file
            return
