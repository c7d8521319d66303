"""Figures of a run, computed from the entries of its metrics file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

from mpicomm import metrics_file
from mpicomm.metrics_file import PARTS
from mpicomm.reports.runs import BEGINNINGS, Entry, Run, percentages

_STATES = {"end": "complete", "preempted": "preempted"}
_LOWER_IS_BETTER = {"loss", "error", "err", "mse", "rmse", "mae", "mape", "nll", "perplexity", "ppl", "wer", "cer"}
_OF_EVERY_ENTRY = {"event", "time", "step", "epoch", "consumed"}


@dataclasses.dataclass(frozen=True)
class Best:
    """The best value of a metric."""

    value: float
    epoch: int
    step: int
    which: str
    """lowest or highest, whichever the metric's name implies to be better."""


@dataclasses.dataclass(frozen=True)
class RecoveryFigures:
    """A recovery from failures of ranks."""

    step: int
    """The step from which the run continued."""

    ranks: tuple[int, ...]
    """The failed ranks."""

    hosts: tuple[str, ...]
    gap_seconds: float | None
    """The time without a complete step; None if no step was completed afterwards."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a run; None where unknown."""

    run: str
    state: str
    """complete, preempted or interrupted; a run in progress is also reported as interrupted."""

    why: str | None
    """The reason of the preemption."""

    ranks: int | None
    ranks_before: tuple[int, ...]
    """Earlier numbers of ranks, before resumes and recoveries that changed the number."""

    resumes: int
    recoveries: tuple[RecoveryFigures, ...]
    epochs: int
    steps: int
    samples: int
    training_seconds: float
    """Seconds of the step entries, without evaluation. The time from the last entry to an interruption is unknown."""

    samples_per_s: float | None
    last_loss: float | None
    last_evaluation: dict[str, float]
    best_evaluation: dict[str, Best]
    time_percent: dict[str, float]
    """Percentages of the training time of rank 0 by part."""

    peak_memory_mib: float | None
    """Maximum over all ranks if the run is complete; otherwise of rank 0."""

    warnings: tuple[str, ...]


def compute(run: Run) -> Figures:
    """Return the figures of a run."""
    steps, evaluations = run.select("step"), run.select("eval")
    last = run.entries[-1] if run.entries else Entry()
    state, why = _state(run)
    ranks = _ranks(run)
    seconds = sum(entry.seconds for entry in steps)
    losses = [loss for entry in steps if (loss := entry.number("loss")) is not None]
    return Figures(
        run=run.name,
        state=state,
        why=why,
        ranks=ranks[-1] if ranks else None,
        ranks_before=tuple(ranks[:-1]),
        resumes=len(run.select("resume")),
        recoveries=tuple(_recoveries(run)),
        epochs=last.epoch,
        steps=last.step,
        samples=_samples(run, last),
        training_seconds=seconds,
        samples_per_s=sum(entry.samples for entry in steps) / seconds if seconds else None,
        last_loss=losses[-1] if losses else None,
        last_evaluation=metrics(evaluations[-1]) if evaluations else {},
        best_evaluation=_best(evaluations),
        time_percent=percentages({name: sum(entry.parts[name] for entry in steps) for name in PARTS}),
        peak_memory_mib=_peak_memory(run),
        warnings=run.warnings,
    )


def as_json(figures: Figures) -> dict[str, Any]:
    """Return the figures for JSON, with None for infinities and NaN, which JSON does not support."""
    return metrics_file.finite(dataclasses.asdict(figures))


def metrics(evaluation: Entry) -> dict[str, float]:
    """Return the numbers of an evaluation entry by metric."""
    names = [name for name in evaluation.values if name not in _OF_EVERY_ENTRY | {"eval_samples"}]
    return {name: value for name in names if (value := evaluation.number(name)) is not None}


def _state(run: Run) -> tuple[str, str | None]:
    decisive = run.select(*BEGINNINGS, *_STATES)
    last = decisive[-1] if decisive else Entry()
    why = str(last.values.get("why", "unknown")) if last.event == "preempted" else None
    return _STATES.get(last.event, "interrupted"), why


def _ranks(run: Run) -> list[int]:
    """Return the numbers of ranks in order, without consecutive duplicates."""
    found = [int(ranks) for entry in run.select(*BEGINNINGS) if (ranks := entry.number("ranks")) is not None]
    return [ranks for ranks, _ in itertools.groupby(found)]


def _recoveries(run: Run) -> list[RecoveryFigures]:
    found: list[RecoveryFigures] = []
    for entry in run.select("recovery", "recovered"):
        if entry.event == "recovered" and found:
            found[-1] = dataclasses.replace(found[-1], gap_seconds=entry.number("gap_s"))
        elif entry.event == "recovery":
            listed = entry.values.get("failures")
            failures = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
            ranks, hosts = (
                [each for failure in failures for each in failure.get(name, [])] for name in ("ranks", "hosts")
            )
            found.append(RecoveryFigures(entry.step, tuple(ranks), tuple(hosts), None))
    return found


def _samples(run: Run, last: Entry) -> int:
    whole = [entry.number("samples") or 0 for entry in run.select("epoch") if entry.epoch <= last.epoch]
    return int(sum(whole)) + last.consumed


def _best(evaluations: list[Entry]) -> dict[str, Best]:
    found: dict[str, Best] = {}
    for entry in evaluations:
        for name, value in metrics(entry).items():
            which = "lowest" if _is_lower_better(name) else "highest"
            before = found.get(name)
            is_better = before is None or (value < before.value if which == "lowest" else value > before.value)
            if math.isfinite(value) and is_better:
                found[name] = Best(value, entry.epoch, entry.step, which)
    return found


def _is_lower_better(name: str) -> bool:
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _peak_memory(run: Run) -> float | None:
    found = [value for entry in run.select("step") if (value := entry.number("memory_mib")) is not None]
    for entry in run.select("end"):
        ranks = entry.values.get("ranks")
        each_rank = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
        found += [rank["memory"] / 2**20 for rank in each_rank if isinstance(rank.get("memory"), int)]
    return max(found, default=None)
