"""The metrics of a run, computed from the entries of its metrics file, and their table with a column for each run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mpicomm import metrics_file, terminal
from mpicomm.metrics_file import PARTS
from mpicomm.reports.runs import BEGINNINGS, Entry, Run, percentages

_STATES = {"end": "complete", "preempted": "preempted"}
_LOWER_IS_BETTER = {
    "loss", "logloss", "error", "err", "mse", "rmse", "nrmse", "mae", "mape", "nll", "entropy", "divergence", "div",
    "kl", "perplexity", "ppl", "bits", "bpb", "bpc", "wer", "cer", "eer", "fid", "lpips",
}  # fmt: skip
_HIGHER_IS_BETTER = {
    "accuracy", "acc", "top1", "top5", "precision", "recall", "f1", "auc", "auroc", "roc", "ap", "map", "iou", "miou",
    "dice", "bleu", "rouge", "meteor", "r2", "mrr", "ndcg", "psnr", "ssim", "score", "reward", "correlation",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")  # of `valLoss`, `MSELoss`, `eval_f1`


@dataclasses.dataclass(frozen=True)
class Best:
    """The best value of a metric."""

    value: float
    epoch: int
    step: int
    which: str
    """lowest or highest, whichever the metric's name implies to be better; other metrics have no best value."""


@dataclasses.dataclass(frozen=True)
class RecoveryMetrics:
    """A recovery from failures of ranks."""

    step: int
    """The step from which the run continued."""

    ranks: tuple[int, ...]
    """The failed ranks."""

    hosts: tuple[str, ...]
    gap_seconds: float | None
    """The time without a complete step; None if no step was completed afterwards."""


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run; None where unknown."""

    run: str
    state: str
    """complete, preempted or interrupted; a run in progress is also reported as interrupted."""

    why: str | None
    """The reason of the preemption."""

    ranks: int | None
    ranks_before: tuple[int, ...]
    """Earlier numbers of ranks, before resumes and recoveries that changed the number."""

    resumes: int
    recoveries: tuple[RecoveryMetrics, ...]
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


def compute(run: Run) -> RunMetrics:
    """Return the metrics of a run."""
    steps, evaluations = run.select("step"), run.select("eval", "step_eval")
    last = run.entries[-1] if run.entries else Entry()
    state, why = _state(run)
    ranks = _ranks(run)
    seconds = sum(entry.seconds for entry in steps)
    losses = [loss for entry in steps if (loss := entry.number("loss")) is not None]
    return RunMetrics(
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
        last_evaluation=evaluation_metrics(evaluations[-1]) if evaluations else {},
        best_evaluation=_best(evaluations),
        time_percent=percentages({name: sum(entry.parts[name] for entry in steps) for name in PARTS}),
        peak_memory_mib=_peak_memory(run),
        warnings=run.warnings,
    )


def as_json(metrics: RunMetrics) -> dict[str, Any]:
    """Return the metrics for JSON, with None for infinities and NaN, which JSON does not support."""
    return metrics_file.finite(dataclasses.asdict(metrics))


def evaluation_metrics(evaluation: Entry) -> dict[str, float]:
    """Return the numbers of an evaluation entry by metric."""
    names = [name for name in evaluation.values if name not in metrics_file.ENTRY_FIELDS | {"eval_samples"}]
    return {name: value for name in names if (value := evaluation.number(name)) is not None}


def _state(run: Run) -> tuple[str, str | None]:
    decisive = run.select(*BEGINNINGS, *_STATES)
    last = decisive[-1] if decisive else Entry()
    why = str(last.values.get("why", "unknown")) if last.event == "preempted" else None
    return _STATES.get(last.event, "interrupted"), why


def _ranks(run: Run) -> list[int]:
    """Return the numbers of ranks in order, without consecutive duplicates."""
    numbers = [int(ranks) for entry in run.select(*BEGINNINGS) if (ranks := entry.number("ranks")) is not None]
    return [ranks for ranks, _ in itertools.groupby(numbers)]


def _recoveries(run: Run) -> list[RecoveryMetrics]:
    recoveries: list[RecoveryMetrics] = []
    for entry in run.select("recovery", "recovered"):
        if entry.event == "recovered" and recoveries:
            recoveries[-1] = dataclasses.replace(recoveries[-1], gap_seconds=entry.number("gap_s"))
        elif entry.event == "recovery":
            listed = entry.values.get("failures")
            failures = [failure for failure in listed if isinstance(failure, dict)] if isinstance(listed, list) else []
            ranks, hosts = (
                tuple(item for failure in failures for item in failure.get(name, [])) for name in ("ranks", "hosts")
            )
            recoveries.append(RecoveryMetrics(entry.step, ranks, hosts, None))
    return recoveries


def _samples(run: Run, last: Entry) -> int:
    whole = [entry.number("samples") or 0 for entry in run.select("epoch") if entry.epoch <= last.epoch]
    return int(sum(whole)) + last.consumed


def _best(evaluations: list[Entry]) -> dict[str, Best]:
    best: dict[str, Best] = {}
    for entry in evaluations:
        for name, value in evaluation_metrics(entry).items():
            before, which = best.get(name), _better(name)
            is_better = before is None or (value < before.value if which == "lowest" else value > before.value)
            if which is not None and math.isfinite(value) and is_better:
                best[name] = Best(value, entry.epoch, entry.step, which)
    return best


def _better(name: str) -> str | None:
    """Return which values of a metric are better, "lowest" or "highest"; None if its name does not tell."""
    words = {word.lower() for word in [*_WORD.findall(name), *re.split(r"[^A-Za-z0-9]+", name)]}
    if words & _LOWER_IS_BETTER:
        return "lowest"
    return "highest" if words & _HIGHER_IS_BETTER else None


def _peak_memory(run: Run) -> float | None:
    mebibytes = [value for entry in run.select("step") if (value := entry.number("memory_mib")) is not None]
    for entry in run.select("end"):
        ranks = entry.values.get("ranks")
        memories = [rank.get("memory") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
        mebibytes += [memory / 2**20 for memory in memories if isinstance(memory, int)]
    return max(mebibytes, default=None)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(runs: Sequence[RunMetrics]) -> Table:
    """Return the table of some runs."""
    metrics = dict.fromkeys(name for run in runs for name in run.last_evaluation | run.best_evaluation)
    columns = [_column(run, list(metrics)) for run in runs]
    names = [run.run for run in runs]
    rows = [[row, *[column[row] for column in columns]] for row in columns[0]]
    return terminal.table(["", *names], rows, right=names, title="runs" if len(runs) > 1 else "run")


def format_duration_with_unit(seconds: float) -> str:
    """Return a duration with its unit: `3.2 s`, `1:05 min` or `2:00:10 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{terminal.format_duration(seconds)} {'min' if round(seconds) < 3600 else 'h'}"


def _column(run: RunMetrics, metrics: Sequence[str]) -> dict[str, str]:
    """Return the cells of a run by row."""
    before = f" (previously {', '.join(map(str, run.ranks_before))})" if run.ranks_before else ""
    evaluations = {}
    for metric in metrics:
        best = run.best_evaluation.get(metric)
        evaluations[f"{metric}, last"] = _format_or_dash(run.last_evaluation.get(metric), "{:.4g}")
        evaluations[f"{metric}, best"] = _format_or_dash(best, "{0.value:.4g} ({0.which}, step {0.step})")
    return {
        "state": _format_state(run),
        "ranks": _format_or_dash(run.ranks, f"{{}}{before}"),
        "resumes": str(run.resumes),
        "recoveries": _format_recoveries(run.recoveries),
        "epochs": str(run.epochs),
        "steps": f"{run.steps:,}",
        "samples": f"{run.samples:,}",
        "training time": format_duration_with_unit(run.training_seconds),
        "samples/s": _format_or_dash(run.samples_per_s, "{:,.0f}"),
        "loss, last": _format_or_dash(run.last_loss, "{:.4g}"),
        **evaluations,
        **{f"time in {part}": _format_or_dash(run.time_percent.get(part), "{:.0f} %") for part in PARTS},
        "peak memory": _format_or_dash(run.peak_memory_mib, "{:,.0f} MiB"),
    }


def _format_recoveries(recoveries: Sequence[RecoveryMetrics]) -> str:
    """Return the recoveries of a run, one per line: the failed ranks, their hosts, and the time without a step."""
    lines = [
        f"rank{'s' if len(recovery.ranks) > 1 else ''} {', '.join(map(str, recovery.ranks))} on "
        f"{', '.join(sorted(set(recovery.hosts)))} after step {recovery.step}: "
        f"{_format_or_dash(recovery.gap_seconds, '{:.2f} s')}"
        for recovery in recoveries
    ]
    return "\n".join(lines) or "0"


def _format_or_dash(value: Any, form: str) -> str:
    """Return a value in a format, or a dash if it is unknown."""
    return "-" if value is None else form.format(value)


def _format_state(run: RunMetrics) -> str:
    if run.state == "interrupted":
        return "interrupted or running"
    return run.state if run.why is None else f"{run.state}: {run.why}"
