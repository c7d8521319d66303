"""docs/conformance.md, made of the results' files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.conformance import results
from tests.conformance.results import GLOO, LABELS, Results, Run
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.launching import ROOT

PATH = ROOT / "docs" / "conformance.md"

_INTRODUCTION = """\
# PyTorch's own tests, run on this back end

PyTorch tests its back ends with `DistributedTest`, which its wheels carry
(`torch.testing._internal.distributed.distributed_test`). `python -m tests.conformance` runs it unchanged under
`mpirun`, every test on all ranks, in a default group of its own.

The tests ask for the back end's name, and reserve some tests for some names: all_to_all for `mpi`, sparse tensors and
deadlines for `gloo`. So they are run three times, as `mpicomm`, `mpi` and `gloo`, and each time a group of that name is
ours; a group that is not fails its test. A test **passes** if it passes under at least one name and fails under none.
It must pass on every rank. **Gloo** is torch's own, with the same tests on the same machine. GPUs are hidden.

`python -m tests.conformance --write` measures and makes this page; `python -m tests.conformance --at-least N` only
measures, and fails if a test fails or fewer than N pass.
"""
_NOTE = """\
Where the MPIs agree, one word stands for both. "Small world size" are fewer than 8 ranks; `mpi` is exempt from that.
"""


def write() -> None:
    """Write the page."""
    PATH.write_text(text(results.read_all()))


def text(measured: Sequence[Results]) -> str:
    """Return the page."""
    parts = [_INTRODUCTION, *map(_described, measured), _summary(measured), _shortfalls(measured), _tests(measured)]
    return "\n".join(parts)


def _described(each: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in each.about["versions"].items())
    return (
        f"- {each.about['date']}, one machine with {each.about['cores']} cores, no GPU: {versions}. "
        f"`{each.about['command']}`\n"
    )


def _summary(measured: Sequence[Results]) -> str:
    """Return how many tests passed, failed and were skipped."""
    rows = []
    for each in measured:
        for size, run in each.runs.items():
            counts = run.counts()
            cells = [_shown_counts(counts.get(column)) for column in ("all", *LABELS, GLOO)]
            rows.append([each.mpi, str(size), f"**{cells[0]}**", *cells[1:], f"{run.seconds:.0f}"])
    head = ["MPI", "ranks", "pass / fail / skip", *(f"as `{label}`" for label in LABELS), "torch's Gloo", "seconds"]
    return "## Summary\n\n" + _table(head, rows)


def _shown_counts(counts: dict[str, int] | None) -> str:
    return " / ".join(str(counts[outcome]) for outcome in (PASS, FAIL, SKIP)) if counts else ""


# -- what falls short --------------------------------------------------------------------------------------------------


def _shortfalls(measured: Sequence[Results]) -> str:
    """Return the tests that fail, and those that Gloo passes and ours does not."""
    rows = [
        [
            f"`{name}`",
            f"{each.mpi}, {size} ranks",
            run.verdict(name).outcome,
            _shown(run.gloo.get(name)),
            _why(run, name),
        ]
        for each in measured
        for size, run in each.runs.items()
        for name in shortfalls(run)
    ]
    if not rows:
        return "## Shortfalls\n\nNone: no test fails, and Gloo passes none that ours does not.\n"
    return "## Shortfalls\n\n" + _table(["test", "on", "ours", GLOO, "why"], rows)


def shortfalls(run: Run) -> list[str]:
    """Return the names of the tests that fail, and of those that Gloo passes and ours does not."""
    passed_by_gloo = {name for name, verdict in run.gloo.items() if verdict.outcome == PASS}
    return [
        name
        for name, verdict in run.verdicts().items()
        if verdict.outcome == FAIL or (verdict.outcome == SKIP and name in passed_by_gloo)
    ]


def _why(run: Run, name: str) -> str:
    return _escaped(run.verdict(name).reason)


# -- every test --------------------------------------------------------------------------------------------------------


def _tests(measured: Sequence[Results]) -> str:
    """Return every test, those that need a GPU by name alone."""
    names = sorted({name for each in measured for run in each.runs.values() for name in run.names()})
    need_gpu = [name for name in names if all(verdict.needs_gpu for verdict in _of_test(measured, name).values())]
    sizes = sorted({size for each in measured for size in each.runs})
    rows = [_row(measured, name, sizes) for name in names if name not in need_gpu]
    head = [
        "test",
        *(f"{size} ranks" for size in sizes),
        *(f"Gloo, {size} ranks" for size in sizes),
        "why it is skipped",
    ]
    return (
        f"## Every test\n\n{_NOTE}\n{_table(head, rows)}\n"
        f"### {len(need_gpu)} tests that are skipped because they need a GPU\n\n"
        f"{', '.join(f'`{name}`' for name in need_gpu)}\n"
    )


def _of_test(measured: Sequence[Results], name: str) -> dict[tuple[str, int], Verdict]:
    """Return what ours says of a test, by MPI and number of ranks."""
    return {
        (each.mpi, size): run.verdict(name)
        for each in measured
        for size, run in each.runs.items()
        if name in run.names()
    }


def _row(measured: Sequence[Results], name: str, sizes: Sequence[int]) -> list[str]:
    ours = [_cell(measured, size, lambda run: run.verdict(name)) for size in sizes]
    gloo = [_cell(measured, size, lambda run: run.gloo.get(name)) for size in sizes]
    return [f"`{name}`", *ours, *gloo, _reasons(measured, name, sizes)]


def _cell(measured: Sequence[Results], size: int, of: Callable[[Run], Verdict | None]) -> str:
    """Return the outcome at one number of ranks: one word if all MPIs agree."""
    outcomes = {each.mpi: _shown(of(each.runs[size])) for each in measured if size in each.runs}
    if len(set(outcomes.values())) == 1:
        return next(iter(outcomes.values()))
    return ", ".join(f"{outcome} ({mpi})" for mpi, outcome in outcomes.items())


def _reasons(measured: Sequence[Results], name: str, sizes: Sequence[int]) -> str:
    """Return why ours skips a test; where that is not so at all numbers of ranks, with those at which it is."""
    where: dict[str, set[int]] = {}
    for (_, size), verdict in _of_test(measured, name).items():
        if verdict.outcome == SKIP:
            where.setdefault(verdict.reason, set()).add(size)
    return "; ".join(
        _explained(reason) + ("" if at == set(sizes) else f" (at {', '.join(map(str, sorted(at)))} ranks)")
        for reason, at in where.items()
    )


def _explained(reason: str) -> str:
    """Say what PyTorch means where it gives nothing but an issue's address."""
    return f"PyTorch has switched it off: {reason}" if reason.startswith("https:") else _escaped(reason)


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"**{FAIL}**" if verdict.outcome == FAIL else verdict.outcome


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")
