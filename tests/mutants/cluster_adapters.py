"""Faults in the modules that the adapters of Dask and Ray share; their packages are not in the environment."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "until_rank_0_leaves",
        old="store.set(key, _with_causes(error))",
        fault="Rank 0 does not announce that it has left the block with an exception, so the other ranks wait.",
        tests="tests/launch/test_serving.py -k wait_until",
    ),
    Mutant(
        "start_seconds",
        old="_START_SHARE * _session().request.operation_timeout.total_seconds()",
        new="_session().request.operation_timeout.total_seconds()",
        fault="A cluster may take as long to start as the operations in which the other ranks wait for it.",
        tests="tests/launch/test_serving.py -k wait_until",
    ),
    Mutant(
        "_wait_for_rank_0",
        old="not (watch is not None and watch.has_lost_rank_0)",
        new="True",
        fault="Ranks query the store of a rank 0 that is known to be dead, so torch prints a stack on each.",
        tests="tests/launch/test_serving.py -k killed",
    ),
    Mutant(
        "_wait_for_rank_0",
        old="rank_failures.raise_if_failed(None)",
        fault="Ranks that serve rank 0 do not recover with the others after a failure.",
        tests="tests/recovery/test_recovery.py -k serve",
    ),
    Mutant(
        "is_older",
        old="numbers(version) < numbers(other)",
        new="version < other",
        fault="Versions are compared as text, so that 2.9 is newer than 2.52.",
        tests="tests/unit/test_required_package.py",
    ),
]
