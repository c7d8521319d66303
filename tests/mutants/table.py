"""All mutants."""

from __future__ import annotations

from tests.mutants import backend, launch_and_faults, node_and_verbs, training

MUTANTS = [
    *backend.MUTANTS,
    *node_and_verbs.MUTANTS,
    *launch_and_faults.MUTANTS,
    *training.MUTANTS,
]
