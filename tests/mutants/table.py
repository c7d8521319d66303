"""All mutants."""

from __future__ import annotations

from tests.mutants import (
    accelerator_counting,
    accelerator_users,
    backend,
    cluster_adapters,
    containers,
    devices,
    doctor_checks,
    gpu_transfers,
    horovod,
    horovod_scripts,
    kubernetes,
    launch_and_watchdog,
    launchers,
    lightning,
    recovery,
    rpc_adapter,
    shm_and_collective_ops,
    startup_and_messages,
    trainer_output,
    training,
)

MUTANTS = [
    *accelerator_counting.MUTANTS,
    *accelerator_users.MUTANTS,
    *backend.MUTANTS,
    *cluster_adapters.MUTANTS,
    *containers.MUTANTS,
    *devices.MUTANTS,
    *doctor_checks.MUTANTS,
    *gpu_transfers.MUTANTS,
    *shm_and_collective_ops.MUTANTS,
    *launch_and_watchdog.MUTANTS,
    *launchers.MUTANTS,
    *horovod.MUTANTS,
    *horovod_scripts.MUTANTS,
    *kubernetes.MUTANTS,
    *lightning.MUTANTS,
    *recovery.MUTANTS,
    *rpc_adapter.MUTANTS,
    *startup_and_messages.MUTANTS,
    *training.MUTANTS,
    *trainer_output.MUTANTS,
]
