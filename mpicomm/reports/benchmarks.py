"""Tables and plots of the results of `mpicomm bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from mpicomm import terminal
from mpicomm.reports import plots
from mpicomm.reports.result_files import Rows, is_of_operations, key_of, kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Names of backends in results files, as in bench/compared_backends.py, which imports torch and MPI.
OURS, MPI4PY, NOTHING = "mpi", "mpi4py", "none"
_UNKNOWN = "-"
_INCHES_WIDE, _INCHES_EACH = 10.0, 3.6
_TICKS = 8
_CONDITIONS = ("ranks", "nodes", "device", "inputs")  # fields of results that must be equal in runs to compare
_PANELS = (("us", "latency (us)"), ("busbw", "bus bandwidth (GB/s)"))


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(results: Mapping[str, Any], before: Rows = ()) -> list[Table]:
    """Return the tables of a benchmark: of operations, training steps or decoding.

    Args:
        results: The results, as in the JSON file.
        before: Rows of an earlier run of the same operations to compare with.
    """
    rows = results["rows"]
    if is_of_operations(rows):
        return operation_tables(rows, before)
    return [step_table(rows) if "strategy" in rows[0] else decode_table(rows)]


def notes(results: Mapping[str, Any]) -> list[str]:
    """Return the lines below the tables."""
    lines = [f"{case}: {reason}" for case, reason in results.get("refused", {}).items()]
    if "inputs" in results:
        lines.append(f"inputs: {results['inputs']}")
        if note := _note_on_interrupted_calls(results["rows"]):
            lines.append(note)
    return lines


def differences(results: Mapping[str, Any], before: Mapping[str, Any], name: str) -> list[str]:
    """Return warnings that results are not comparable with those of an earlier run.

    Args:
        results: The results, as in the JSON file.
        before: Those of the earlier run.
        name: The name of the earlier run.
    """
    warnings = [
        f"the runs differ in `{condition}`: {before[condition]} in {name}, now {results[condition]}."
        for condition in _CONDITIONS
        if condition in before and before[condition] != results[condition]
    ]
    if not {key_of(row) for row in before["rows"]} & {key_of(row) for row in results["rows"]}:
        warnings.append(f"nothing is compared: no row of {name} has an operation, dtype, size and backend of this run.")
    return warnings


def has_curves(rows: Rows) -> bool:
    """Return whether `draw` has curves to draw: these are rows of operations, at least one on tensors."""
    return any("operation" in row and row["nbytes"] > 0 for row in rows)


def operation_tables(rows: Rows, before: Rows = ()) -> list[Table]:
    """Return the tables of operations, one for each operation, dtype and placement (in or out of place).

    Args:
        rows: The rows of `bench.sweep.measure`, as dicts.
        before: Rows of an earlier run to compare with.
    """
    earlier = {key_of(row): row["us"] for row in before}
    return [_operation_table(kind, of_kind, earlier) for kind, of_kind in _by_kind(rows).items()]


def step_table(rows: Rows) -> Table:
    """Return the table of training steps, the rows of `bench.training.measure`."""
    cells = []
    ms = {(row["model"], row["strategy"], row["backend"]): row["ms"] for row in rows}
    for row in rows:
        names = [row["model"], _format(row.get("parameters"), ","), row["strategy"], row["backend"]]
        steps = ("ms", "ms_median", "data_ms", "compute_ms", "communication_ms")
        metrics = [_format(row.get(name), ".3f") for name in steps]
        ratios = [_ratio(row["ms"], ms.get((row["model"], row["strategy"], other))) for other in (OURS, NOTHING)]
        cells.append([*names, *metrics, *ratios])
    return _table("milliseconds per step", ["model", "params", "strategy", "backend"],
        ["step", "median", "data", "compute", "comm", "/ mpi", "/ none"], cells)  # fmt: skip


def decode_table(rows: Rows) -> Table:
    """Return the table of decoding, the rows of `bench.decode.measure`."""
    cells = []
    ours = {row["model"]: row["tokens_per_s"] for row in rows if row["backend"] == OURS}
    for row in rows:
        metrics = [_format(row.get(name), ".1f") for name in ("tokens_per_s", "tokens_per_s_median", "us_per_token")]
        reductions = [_format(row.get("all_reduces") or None, "d"), _UNKNOWN]
        if row.get("all_reduces") and "nbytes" in row:
            reductions[1] = terminal.format_size(row["nbytes"])
        names = [row["model"], _format(row.get("parameters"), ","), row["backend"]]
        ratio = _ratio(row["tokens_per_s"], ours.get(row["model"]))
        cells.append([*names, *metrics, *reductions, _format(row.get("wrong"), "d"), ratio])
    return _table("tokens per second", ["model", "params", "backend"],
        ["tokens/s", "median", "us/token", "reductions", "size", "wrong", "/ mpi"], cells)  # fmt: skip


def _note_on_interrupted_calls(rows: Rows) -> str | None:
    """Return a note on rows whose mean exceeds the 99th percentile; None if there are none."""
    above = sum(row.get("us_p99") is not None and row["us"] > row["us_p99"] for row in rows)
    if not above:
        return None
    return (
        f"In {above} of {len(rows)} rows, the mean (us) exceeds p99: fewer than 1 % of the calls, which the system "
        f"interrupted, took most of the time. p50 is the latency of the other calls."
    )


def _operation_table(kind: tuple[str, str, bool], rows: Rows, earlier: Mapping[Any, float]) -> Table:
    # 1. the columns
    backends = {row["backend"] for row in rows}
    us = {(row["nbytes"], row["backend"]): row["us"] for row in rows}
    shown: dict[str, Callable[[Mapping[str, Any]], str]] = {}
    if any(row.get("overlap") is not None for row in rows):
        shown["overlap"] = lambda row: _format(row.get("overlap"), ".0f", " %")
    if MPI4PY in backends and backends != {MPI4PY}:
        shown["- mpi4py us"] = lambda row: _difference(row["us"], us.get((row["nbytes"], MPI4PY)))
    if OURS in backends and backends != {OURS}:
        shown["/ mpi"] = lambda row: _ratio(row["us"], us.get((row["nbytes"], OURS)))
    if earlier:
        shown["/ before"] = lambda row: _ratio(row["us"], earlier.get(key_of(row)))
    # 2. the rows; only the first row of a size shows it
    size, cells = None, []
    for row in sorted(rows, key=lambda row: row["nbytes"]):
        first = "" if row["nbytes"] == size else terminal.format_size(row["nbytes"])
        size = row["nbytes"]
        cells.append([first, *_cells(row), *[show(row) for show in shown.values()]])
    table = _table(_title_of(kind), ["size", "backend"], ["us", "p50", "p99", "GB/s", "bus", "wrong", *shown], cells)
    table.columns[0].justify = "right"
    return table


def _table(title: str, names: Sequence[str], metrics: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a table whose columns are names, aligned to the left, and metrics."""
    style: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    return terminal.table([*names, *metrics], rows, right=metrics, title=title, **style)


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = [row.get(name) for name in ("us", "us_p50", "us_p99")]
    latencies = [_format(us, ".2f" if us is None or us < 1000 else ".0f") for us in times]
    bandwidths = [_format(row.get(name), ".2f") for name in ("algbw", "busbw")]
    return [row["backend"], *latencies, *bandwidths, _format(row.get("wrong"), "d")]


def _format(value: float | None, spec: str, unit: str = "") -> str:
    """Return a value as text; rows of earlier versions lack some values."""
    return _UNKNOWN if value is None else f"{value:{spec}}{unit}"


def _ratio(value: float, other: float | None) -> str:
    return _format(value / other if other else None, ".2f")


def _difference(value: float, other: float | None) -> str:
    return _format(None if other is None else value - other, "+.1f")


# -- plots -------------------------------------------------------------------------------------------------------------


def draw(rows: Rows) -> Figure:
    """Return the plot of operations: latency and bus bandwidth by size, one curve per backend.

    Each operation, dtype and placement (in or out of place) has two panels; barriers, which have no sizes, have none.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    kinds = {kind: of_kind for kind, of_kind in _by_kind(rows).items() if has_curves(of_kind)}
    figure = plots.new_figure((_INCHES_WIDE, _INCHES_EACH * max(1, len(kinds))))
    panels = figure.subplots(max(1, len(kinds)), len(_PANELS), squeeze=False)
    for (kind, of_kind), pair in zip(kinds.items(), panels, strict=False):
        for axes, (name, label) in zip(pair, _PANELS, strict=True):
            _draw(axes, of_kind, name)
            axes.set_title(_title_of(kind), fontsize="medium")
            axes.set_ylabel(label)
    return figure


def _draw(axes: Axes, rows: Rows, name: str) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        of_backend = [row for row in rows if row["backend"] == backend]
        points = [(row["nbytes"], row[name]) for row in of_backend if row["nbytes"] > 0 and (row.get(name) or 0) > 0]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=backend, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["nbytes"] for row in rows})
    ticks = sizes[:: max(1, -(-len(sizes) // _TICKS))]
    axes.set_xticks(ticks, [terminal.format_size(size) for size in ticks], fontsize="small")
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


# -- both --------------------------------------------------------------------------------------------------------------


def _by_kind(rows: Rows) -> dict[tuple[str, str, bool], list[Mapping[str, Any]]]:
    by_kind: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(kind_of(row), []).append(row)
    return by_kind


def _title_of(kind: tuple[str, str, bool]) -> str:
    operation, dtype, in_place = kind
    return f"{operation}, {dtype}, {'in place' if in_place else 'out of place'}"
