"""The tables and curves in which `mpicomm bench` shows its figures."""

from __future__ import annotations

from typing import Any

import pytest
from rich.table import Table

from mpicomm.reports import benchmarks


def row(backend: str, us: float, nbytes: int = 1024, **values: Any) -> dict[str, Any]:
    kind = {"operation": "all_reduce", "dtype": "float32", "in_place": True}
    figures = {"us_p50": None, "us_p99": None, "algbw": us / 100, "busbw": us / 50, "wrong": 0, "overlap": None}
    return {**kind, "nbytes": nbytes, "backend": backend, "us": us, **figures, **values}


def cells(table: Table) -> dict[str, list[Any]]:
    """Return the cells of each column by its title."""
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def test_the_table_compares_with_mpicomm_with_mpi4py_and_with_before() -> None:
    rows = [
        row("mpi", 10.0, us_p50=9.0, us_p99=12.0),
        row("gloo", 40.0, wrong=3),
        row("mpi4py", 8.0),
        row("mpi", 2000.0, 2**20),
    ]
    (table,) = benchmarks.operation_tables(
        rows, [row("mpi", 5.0), row("gloo", 80.0), row("mpi", 1.0, operation="reduce")]
    )
    assert table.title == "all_reduce, float32, in place"
    assert cells(table) == {
        "size": ["1 KiB", "", "", "1 MiB"],
        "backend": ["mpi", "gloo", "mpi4py", "mpi"],
        "us": ["10.00", "40.00", "8.00", "2000"],
        "p50": ["9.00", "-", "-", "-"],
        "p99": ["12.00", "-", "-", "-"],
        "GB/s": ["0.10", "0.40", "0.08", "20.00"],
        "bus": ["0.20", "0.80", "0.16", "40.00"],
        "wrong": ["0", "3", "0", "0"],
        "- mpi4py us": ["+2.0", "+32.0", "+0.0", "-"],
        "/ mpi": ["1.00", "4.00", "0.80", "1.00"],
        "/ before": ["2.00", "0.50", "-", "-"],
    }


def test_each_operation_has_a_table_of_its_own_with_the_overlap() -> None:
    rows = [row("mpi", 10.0, overlap=87.6), row("mpi", 10.0, in_place=False, overlap=3.0)]
    tables = benchmarks.operation_tables(rows)
    assert [each.title for each in tables] == ["all_reduce, float32, in place", "all_reduce, float32, out of place"]
    assert [cells(each)["overlap"] for each in tables] == [["88 %"], ["3 %"]]


STEPS = {"model": "small", "strategy": "ddp", "backend": "mpi", "ms": 1.5}
DECODING = {"model": "small", "backend": "mpi", "tokens_per_s": 80.0}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"operation": "reduce", "dtype": "int32", "in_place": True, "nbytes": 4, "backend": "mpi", "us": 2.0}, "2.00"),
        (STEPS, "1.500"),
        (DECODING, "80.0"),
        (DECODING | {"all_reduces": 8, "wrong": None}, "8"),
    ],
)
def test_values_that_an_earlier_version_did_not_write_are_shown_as_unknown(values: dict[str, Any], text: str) -> None:
    results = {"inputs": "zeros", "rows": [values]}
    (table,) = benchmarks.tables(results)
    shown = {name: column[0] for name, column in cells(table).items()}
    assert text in shown.values()
    assert list(shown.values()).count("-") >= 4
    assert benchmarks.notes(results) == ["inputs: zeros"]
    assert benchmarks.draw([values] if "operation" in values else []).axes


def test_other_conditions_and_rows_of_the_earlier_run_are_warnings() -> None:
    conditions = {"ranks": 2, "nodes": 1, "device": "cpu", "inputs": "zeros"}
    results = {**conditions, "rows": [row("mpi", 1.0)]}
    assert benchmarks.differences(results, {"ranks": 2, "rows": [row("mpi", 2.0), row("gloo", 3.0)]}, "a.json") == []
    before = {**conditions, "ranks": 4, "device": "cuda", "rows": [row("mpi", 2.0, 8)]}
    ranks, device, rows = benchmarks.differences(results, before, "a.json")
    assert ranks == "the runs differ in `ranks`: 4 in a.json, now 2."
    assert device == "the runs differ in `device`: cuda in a.json, now cpu."
    assert rows.startswith("nothing is compared: no row of a.json")


def test_a_mean_above_the_99th_percentile_is_explained() -> None:
    rows = [row("mpi", 23.7, us_p50=7.9, us_p99=20.0), row("gloo", 10.0, us_p50=9.0, us_p99=12.0), row("mpi4py", 8.0)]
    (inputs, note) = benchmarks.notes({"inputs": "zeros", "rows": rows})
    assert inputs == "inputs: zeros"
    assert note.startswith("In 1 of 3 rows, the mean (us) exceeds p99")
    assert benchmarks.notes({"inputs": "zeros", "rows": rows[1:]}) == [inputs]


def test_curves_of_latency_and_bus_bandwidth() -> None:
    rows = [row("mpi", 10.0), row("gloo", 40.0, busbw=0.0), row("mpi", 20.0, 4096), row("gloo", 70.0, 4096)]
    barrier = row("mpi", 5.0, 0, operation="barrier", busbw=0.0)
    drawn = benchmarks.draw([*rows, barrier, row("mpi", 1.0, operation="reduce")])
    assert not benchmarks.has_curves([barrier])
    latency, bandwidth, *others = drawn.axes
    assert [axes.get_ylabel() for axes in drawn.axes] == ["latency (us)", "bus bandwidth (GB/s)"] * 2
    curves = [[line.get_xydata().tolist() for line in axes.lines] for axes in (latency, bandwidth)]
    assert curves[0] == [[[1024, 10], [4096, 20]], [[1024, 40], [4096, 70]]]
    assert curves[1] == [[[1024, 0.2], [4096, 0.4]], [[4096, 1.4]]]
    assert [line.get_label() for line in bandwidth.lines] == ["mpi", "gloo"]
    assert [axes.get_title() for axes in others] == ["reduce, float32, in place"] * 2
    assert [label.get_text() for label in latency.get_xticklabels()] == ["1 KiB", "4 KiB"]
