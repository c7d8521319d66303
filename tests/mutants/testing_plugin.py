"""Faults in the pytest plugin and the assertion of `mpicomm.testing`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "RanksInStep._agree",
        old="self._fail(outcome, outcomes, report)",
        fault="A test that fails on one rank passes on the others.",
        tests="tests/launch/test_pytest_plugin.py -k some_ranks",
    ),
    Mutant(
        "ranks_in_step._outcome",
        old='_XPASSED if report.longreprtext.startswith("[XPASS(strict)]") else _FAILED',
        new="_FAILED",
        fault="A test with a strict xfail fails, if it fails on one rank and passes on the others.",
        tests="tests/launch/test_pytest_plugin.py -k some_ranks",
    ),
    Mutant(
        "RanksInStep.pytest_sessionfinish",
        old="_PASSED if is_complete else _ENDED",
        new="_PASSED",
        fault="The other ranks do not report that pytest has ended on one rank.",
        tests="tests/launch/test_pytest_plugin.py -k some_ranks",
    ),
    Mutant(
        "TimeLimit._report",
        old="plugin.pytest_sessionfinish()",
        new="pass",
        fault="There is no file of --junitxml after a test has reached its time limit.",
        tests="tests/launch/test_pytest_plugin.py -k time_limit",
    ),
    Mutant(
        "rank_launch.command",
        old='["--with-mpi", *arguments[:end], "--ranks=0", *arguments[end:]]',
        new='["--with-mpi", *arguments[:end], *arguments[end:]]',
        fault="Each rank of `pytest --ranks N` tries to start ranks.",
        tests="tests/unit/test_rank_launch.py",
    ),
    Mutant(
        "equality._without_signs",
        old='(tensor + 0).masked_fill(tensor.isnan(), float("nan"))',
        new="tensor",
        fault="0.0 and -0.0 on different ranks are not equal.",
        tests="tests/collective_ops/test_equality.py",
        ranks=4,
    ),
]
