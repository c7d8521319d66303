"""Faults in the modules that the adapters of Dask and Ray share; their packages are not in the environment."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "integrations/serving.py",
        old="store.set(key, _with_causes(error))",
        new="pass",
        fault="Rank 0 does not announce that it has left the block with an exception, so the other ranks wait.",
        tests="tests/launch/test_serving.py -k wait_until",
        ranks=0,
    ),
    Mutant(
        "integrations/serving.py",
        old="_START_SHARE * _session()",
        new="_session()",
        fault="A cluster may take as long to start as the operations in which the other ranks wait for it.",
        tests="tests/launch/test_serving.py -k wait_until",
        ranks=0,
    ),
    Mutant(
        "integrations/serving.py",
        old="while not (watch is not None and watch.has_lost_rank_0):",
        new="while True:",
        fault="Ranks query the store of a rank 0 that is known to be dead, so torch prints a stack on each.",
        tests="tests/launch/test_serving.py -k killed",
        ranks=0,
    ),
    Mutant(
        "integrations/serving.py",
        old="            rank_failures.check(None)\n            if store.check([key]):",
        new="            if store.check([key]):",
        fault="Ranks that serve rank 0 do not recover with the others after a failure.",
        tests="tests/recovery/test_recovery.py -k serve",
        ranks=0,
    ),
    Mutant(
        "host_info.py",
        old="return numbers(version) < numbers(other)",
        new="return version < other",
        fault="Versions are compared as text, so that 2.9 is newer than 2.52.",
        tests="tests/unit/test_required_package.py",
        ranks=0,
    ),
]
