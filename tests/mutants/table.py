"""All mutants."""

from __future__ import annotations

from tests.mutants import backend, kubernetes, launch_and_watchdog, recovery, shm_and_collective_ops, training

MUTANTS = [
    *backend.MUTANTS,
    *shm_and_collective_ops.MUTANTS,
    *launch_and_watchdog.MUTANTS,
    *kubernetes.MUTANTS,
    *recovery.MUTANTS,
    *training.MUTANTS,
]
