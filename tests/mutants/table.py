"""All mutants."""

from __future__ import annotations

from tests.mutants import (
    backend,
    horovod,
    horovod_scripts,
    kubernetes,
    launch_and_watchdog,
    recovery,
    rpc_adapter,
    shm_and_collective_ops,
    training,
)

MUTANTS = [
    *backend.MUTANTS,
    *shm_and_collective_ops.MUTANTS,
    *launch_and_watchdog.MUTANTS,
    *horovod.MUTANTS,
    *horovod_scripts.MUTANTS,
    *kubernetes.MUTANTS,
    *recovery.MUTANTS,
    *rpc_adapter.MUTANTS,
    *training.MUTANTS,
]
