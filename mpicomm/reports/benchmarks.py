"""Tables of benchmarks of collective operations: one row per size and backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

OURS, MPI4PY = "mpi", "mpi4py"
_UNKNOWN = "-"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows, before: Rows = ()) -> list[Table]:
    """Return the tables, one for each operation, dtype and placement (in or out of place).

    Args:
        rows: The rows of `bench.sweep.measure`, as dicts.
        before: Rows of an earlier run to compare with.
    """
    earlier = {key_of(row): row["us"] for row in before}
    kinds: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row)
    return [_table(kind, each, earlier) for kind, each in kinds.items()]


def key_of(row: Mapping[str, Any]) -> tuple[tuple[str, str, bool], int, str]:
    """Return the unique key of a row within a run: kind, size in bytes and backend."""
    return kind_of(row), row["nbytes"], row["backend"]


def kind_of(row: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return the operation, the dtype and whether it is in place. Each kind has its own table or plot."""
    return row["operation"], row["dtype"], row["in_place"]


def title_of(kind: tuple[str, str, bool]) -> str:
    """Return the title of the table or plot of a kind."""
    operation, dtype, in_place = kind
    return f"{operation}, {dtype}, {'in place' if in_place else 'out of place'}"


def shown_size(nbytes: int) -> str:
    """Return a size with a binary unit, such as 64 MiB."""
    factor, unit = next((factor, unit) for factor, unit in _UNITS if nbytes >= factor or factor == 1)
    return f"{nbytes / factor:.4g} {unit}"


def _table(kind: tuple[str, str, bool], rows: Rows, earlier: Mapping[Any, float]) -> Table:
    # 1. the columns
    has_overlap = any(row["overlap"] is not None for row in rows)
    backends = {row["backend"] for row in rows}
    us = {(row["nbytes"], row["backend"]): row["us"] for row in rows}
    found = Table(title=title_of(kind), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("size", "backend", "us", "p99", "GB/s", "bus", "wrong"):
        found.add_column(title, justify="left" if title == "backend" else "right")
    shown: dict[str, Callable[[Mapping[str, Any]], str]] = {}
    if has_overlap:
        shown["overlap"] = lambda row: f"{row['overlap']:.0f} %"
    if MPI4PY in backends and backends != {MPI4PY}:
        shown["- mpi4py us"] = lambda row: _difference(row["us"], us.get((row["nbytes"], MPI4PY)))
    if OURS in backends and backends != {OURS}:
        shown["/ mpi"] = lambda row: _ratio(row["us"], us.get((row["nbytes"], OURS)))
    if earlier:
        shown["/ before"] = lambda row: _ratio(row["us"], earlier.get(key_of(row)))
    for title in shown:
        found.add_column(title, justify="right")
    # 2. the rows; only the first row of a size shows it
    size = None
    for row in sorted(rows, key=lambda row: row["nbytes"]):
        first = "" if row["nbytes"] == size else shown_size(row["nbytes"])
        size = row["nbytes"]
        found.add_row(first, *_cells(row), *[show(row) for show in shown.values()])
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    p99 = _UNKNOWN if row["us_p99"] is None else _shown(row["us_p99"])
    return [row["backend"], _shown(row["us"]), p99, f"{row['algbw']:.3g}", f"{row['busbw']:.3g}", str(row["wrong"])]


def _shown(us: float) -> str:
    return f"{us:.2f}" if us < 1000 else f"{us:.0f}"


def _ratio(one: float, other: float | None) -> str:
    return _UNKNOWN if other is None else f"{one / other:.2f}"


def _difference(one: float, other: float | None) -> str:
    return _UNKNOWN if other is None else f"{one - other:+.1f}"
