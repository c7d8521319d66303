"""Generates docs/conformance.md from the result files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests import accelerator
from tests.conformance import file_results, results
from tests.conformance.file_results import NEITHER, ONLY_GLOO, OUTCOMES, FileResults
from tests.conformance.results import GLOO, LABELS, Results, Run
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.launching import ROOT

PATH = ROOT / "docs" / "conformance.md"

_INTRODUCTION = """\
# Conformance: PyTorch's own backend tests

PyTorch tests its backends with `DistributedTest`, which is part of its wheels
(`torch.testing._internal.distributed.distributed_test`). `python -m tests.conformance` runs it unchanged under
`mpirun`, every test on all ranks, in a new default group.

The tests check the backend's name, and restrict some tests to some names: all_to_all to `mpi`, sparse tensors and
timeouts to `gloo`. The suite therefore runs three times, as `mpicomm`, `mpi` and `gloo`, and each time the groups of
that name use the mpicomm backend; a group of another backend fails its test. A test **passes** if it passes under at
least one name and fails under none. It must pass on every rank. **Gloo** is torch's own backend, with the same tests on
the same machine. GPUs are hidden.

`python -m tests.conformance --write` runs the tests and generates this page; `python -m tests.conformance --at-least N`
only runs the tests, and fails if a test fails or fewer than N pass.
"""
_NOTE = """\
A cell has one outcome if both MPI libraries give the same. "Small world size" means fewer than 8 ranks; the label `mpi`
is exempt from that restriction.
"""

_ON_DEVICES = """\
## Tests of GPUs

`python -m tests.conformance --device accelerator` runs the tests that use GPUs as `nccl`, the backend for which PyTorch
wrote most of them; the groups of that name use the mpicomm backend, without NCCL. Tests of CPU tensors run as `mpi` and
`gloo` with tensors on devices, such as those of messages with tags and from any source, and of coalesced collectives.
The tests run on the GPUs of the machine, or without one on the emulated accelerator of `tests/accelerator`. The ranks
share the devices. PyTorch's conditions on the number of GPUs and the version of NCCL do not apply, and tests of a group
of ranks 1 and 2 need 3 ranks instead of 8. A test that passes without a tensor on a device counts as skipped.
"""

_FILES = """\
## Test files of PyTorch's repository

PyTorch's tests of FSDP2 with tensor subclasses, of `CommDebugMode` and of functional collectives are not part of its
wheels. `python -m tests.conformance.upstream_files PATH...` runs files of its repository with mpicomm and with Gloo,
under `mpirun`, each test on as many ranks as it needs. Where PyTorch starts processes or threads, every rank runs the
body of the test. The program replaces only the backend and the device, for Gloo too:

- Groups of the backends `gloo`, `threaded` and `fake` have the backend under test.
- Tests that require GPUs run with CPU tensors. Those that need a GPU nevertheless, such as the tests of Triton, are
  skipped, or pass with neither backend.

The program runs failing tests again without the others, because one test may influence the next in the same process;
PyTorch starts new processes for each. It runs a test that still fails with one backend only once more with that
backend, in a job of its own, and records that result.
"""


def write() -> None:
    PATH.write_text(text(results.read_all(), file_results.read_all()))


def text(all_results: Sequence[Results], files: Sequence[FileResults] = ()) -> str:
    measured = [each for each in all_results if each.device == "cpu"]
    on_devices = [each for each in all_results if each.device != "cpu"]
    parts = [_INTRODUCTION, *map(_described, measured), _summary(measured), _shortfalls(measured)]
    parts += [_tests_on_devices(on_devices)] if on_devices else []
    return "\n".join([*parts, *([_files(files)] if files else []), _tests(measured)])


def _described(each: Results | FileResults) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in each.about["versions"].items())
    has_gpu = isinstance(each, Results) and each.device not in ("cpu", accelerator.NAME)
    return (
        f"- {each.about['date']}, one machine with {each.about['cores']} cores, {'a' if has_gpu else 'no'} GPU: "
        f"{versions}. `{each.about['command']}`\n"
    )


def _summary(measured: Sequence[Results]) -> str:
    """Return the section with the numbers of tests that passed, failed and were skipped."""
    rows = []
    for each in measured:
        for size, run in each.runs.items():
            counts = run.counts()
            cells = [_shown_counts(counts.get(column)) for column in ("all", *LABELS, GLOO)]
            rows.append([each.mpi, str(size), f"**{cells[0]}**", *cells[1:], f"{run.seconds:.0f}"])
    head = ["MPI", "ranks", "pass / fail / skip", *(f"as `{label}`" for label in LABELS), "torch's Gloo", "seconds"]
    return "## Summary\n\n" + table(head, rows)


def _shown_counts(counts: dict[str, int] | None) -> str:
    return " / ".join(str(counts[outcome]) for outcome in (PASS, FAIL, SKIP)) if counts else ""


# -- shortfalls --------------------------------------------------------------------------------------------------------


def _shortfalls(measured: Sequence[Results]) -> str:
    """Return the section of the tests that fail, and of those that Gloo passes and mpicomm does not."""
    rows = [
        [
            f"`{name}`",
            f"{each.mpi}, {size} ranks",
            run.verdict(name).outcome,
            shown(run.gloo.get(name)),
            escaped(run.verdict(name).reason),
        ]
        for each in measured
        for size, run in each.runs.items()
        for name in shortfalls(run)
    ]
    if not rows:
        return "## Shortfalls\n\nNo test of `DistributedTest` fails, and mpicomm passes each that Gloo passes.\n"
    return "## Shortfalls\n\n" + table(["test", "on", "mpicomm", GLOO, "reason"], rows)


def shortfalls(run: Run) -> list[str]:
    """Return the names of the tests that fail, and of those that Gloo passes and mpicomm does not."""
    passed_by_gloo = {name for name, verdict in run.gloo.items() if verdict.outcome == PASS}
    return [
        name
        for name, verdict in run.verdicts().items()
        if verdict.outcome == FAIL or (verdict.outcome == SKIP and name in passed_by_gloo)
    ]


# -- tests of GPUs -----------------------------------------------------------------------------------------------------


def _tests_on_devices(measured: Sequence[Results]) -> str:
    """Return the section of the tests on accelerators: their numbers, the failures, and the reasons for skipping."""
    runs = [(results, size, run) for results in measured for size, run in results.runs.items()]
    counts = [
        [results.device, results.mpi, str(size), f"**{_shown_counts(run.counts()['all'])}**", f"{run.seconds:.0f}"]
        for results, size, run in runs
    ]
    failures = [
        [f"`{name}`", f"{results.device}, {results.mpi}, {size} ranks", escaped(verdict.reason)]
        for results, size, run in runs
        for name, verdict in run.verdicts().items()
        if verdict.outcome == FAIL
    ]
    skipped: dict[str, set[str]] = {}
    for _, _, run in runs:
        for name, verdict in run.verdicts().items():
            if verdict.outcome == SKIP:
                skipped.setdefault(_explained(verdict.reason), set()).add(f"`{name}`")
    return "\n".join(
        [
            _ON_DEVICES,
            *map(_described, measured),
            table(["device", "MPI", "ranks", "pass / fail / skip", "seconds"], counts),
            table(["failing test", "on", "reason"], failures) if failures else "No test fails.\n",
            table(
                ["reason for skipping", "tests"], [[why, ", ".join(sorted(names))] for why, names in skipped.items()]
            ),
        ]
    )


# -- test files of PyTorch's repository --------------------------------------------------------------------------------


def _files(measured: Sequence[FileResults]) -> str:
    """Return the section of the test files: how many tests pass with which backend, and those that do not with both."""
    rows = [
        [each.torch, f"`{label}`", *(str(count) for count in file.counts().values())]
        for each in measured
        for label, file in each.files.items()
    ]
    return "\n".join(
        [
            _FILES,
            *map(_described, measured),
            table(["torch", "file", *OUTCOMES], rows),
            _failures(measured, ONLY_GLOO),
            _failures(measured, NEITHER),
        ]
    )


def _failures(measured: Sequence[FileResults], outcome: str) -> str:
    """Return the tests with an outcome, and why mpicomm fails or skips them."""
    rows = [
        [each.torch, f"`{name}`", escaped(file.tests[name].mpicomm.reason)]
        for each in measured
        for file in each.files.values()
        for name in file.of(outcome)
    ]
    backends = "Gloo only" if outcome == ONLY_GLOO else "neither backend"
    if not rows:
        return f"No test passes with {backends}.\n"
    return f"These tests pass with {backends}:\n\n" + table(["torch", "test", "with mpicomm"], rows)


# -- every test --------------------------------------------------------------------------------------------------------


def _tests(measured: Sequence[Results]) -> str:
    """Return the section of all tests; of those that need a GPU, only the names."""
    names = sorted({name for each in measured for run in each.runs.values() for name in run.names()})
    need_gpu = [name for name in names if all(verdict.needs_gpu for verdict in _of_test(measured, name).values())]
    sizes = sorted({size for each in measured for size in each.runs})
    rows = [_row(measured, name, sizes) for name in names if name not in need_gpu]
    head = [
        "test",
        *(f"{size} ranks" for size in sizes),
        *(f"Gloo, {size} ranks" for size in sizes),
        "reason for skipping",
    ]
    return (
        f"## Every test\n\n{_NOTE}\n{table(head, rows)}\n"
        f"### {len(need_gpu)} tests that are skipped because they need a GPU\n\n"
        f"{', '.join(f'`{name}`' for name in need_gpu)}\n"
    )


def _of_test(measured: Sequence[Results], name: str) -> dict[tuple[str, int], Verdict]:
    """Return mpicomm's verdicts on a test, by MPI and number of ranks."""
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
    outcomes = {each.mpi: shown(of(each.runs[size])) for each in measured if size in each.runs}
    if len(set(outcomes.values())) == 1:
        return next(iter(outcomes.values()))
    return ", ".join(f"{outcome} ({mpi})" for mpi, outcome in outcomes.items())


def _reasons(measured: Sequence[Results], name: str, sizes: Sequence[int]) -> str:
    """Return mpicomm's reasons to skip a test, with the numbers of ranks if a reason does not apply to all of them."""
    where: dict[str, set[int]] = {}
    for (_, size), verdict in _of_test(measured, name).items():
        if verdict.outcome == SKIP:
            where.setdefault(verdict.reason, set()).add(size)
    return "; ".join(
        _explained(reason) + ("" if at == set(sizes) else f" (at {', '.join(map(str, sorted(at)))} ranks)")
        for reason, at in where.items()
    )


def _explained(reason: str) -> str:
    """Explain reasons of PyTorch that consist only of the address of an issue."""
    return f"disabled by PyTorch: {reason}" if reason.startswith("https:") else escaped(reason)


# -- tables ------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"**{FAIL}**" if verdict.outcome == FAIL else verdict.outcome


def escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")
