"""mpicomm: MPI-first collective communications for PyTorch.

    import mpicomm
    world = mpicomm.bootstrap()

Importing this package imports neither torch nor MPI: the public names are resolved on first use. The import registers
the backend with torch under the name `mpicomm`.
"""

from __future__ import annotations

import importlib

from mpicomm.backend import plugin as _plugin

TYPE_CHECKING = False  # type checkers recognise the name; importing typing would take longer than this package
if TYPE_CHECKING:
    from typing import Any

    from mpicomm.collective_ops.collectives import (
        all_gather,
        all_gather_object,
        all_reduce,
        all_to_all,
        all_to_all_object,
        barrier,
        broadcast,
        broadcast_object,
        gather,
        gather_object,
        reduce,
        reduce_scatter,
    )
    from mpicomm.collective_ops.handles import Handle, as_completed, wait_all
    from mpicomm.collective_ops.point_to_point import (
        irecv,
        isend,
        recv,
        recv_object,
        scatter,
        scatter_object,
        send,
        send_object,
        sendrecv,
    )
    from mpicomm.errors import (
        CheckpointError,
        DeviceError,
        LaunchError,
        MismatchError,
        MpicommError,
        MPINotFoundError,
        RankFailedError,
        RendezvousError,
        TrainingError,
    )
    from mpicomm.recovery import recover
    from mpicomm.runtime import bootstrap, dump_flight_recorder
    from mpicomm.session import World, current_world, shutdown
    from mpicomm.training.callbacks import Callback
    from mpicomm.training.optimizers import CombinedOptimizer
    from mpicomm.training.parallel import bf16_compression_hook
    from mpicomm.training.preemption import Preempted
    from mpicomm.training.preparation import PreparedLoader, prepare
    from mpicomm.training.standard_callbacks import EMA, BestCheckpoint, EarlyStopping, LearningRateLogger
    from mpicomm.training.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "barrier": "mpicomm.collective_ops.collectives",
    "all_reduce": "mpicomm.collective_ops.collectives",
    "reduce": "mpicomm.collective_ops.collectives",
    "reduce_scatter": "mpicomm.collective_ops.collectives",
    "broadcast": "mpicomm.collective_ops.collectives",
    "gather": "mpicomm.collective_ops.collectives",
    "all_gather": "mpicomm.collective_ops.collectives",
    "all_to_all": "mpicomm.collective_ops.collectives",
    "broadcast_object": "mpicomm.collective_ops.collectives",
    "gather_object": "mpicomm.collective_ops.collectives",
    "all_gather_object": "mpicomm.collective_ops.collectives",
    "all_to_all_object": "mpicomm.collective_ops.collectives",
    "send": "mpicomm.collective_ops.point_to_point",
    "isend": "mpicomm.collective_ops.point_to_point",
    "recv": "mpicomm.collective_ops.point_to_point",
    "irecv": "mpicomm.collective_ops.point_to_point",
    "sendrecv": "mpicomm.collective_ops.point_to_point",
    "scatter": "mpicomm.collective_ops.point_to_point",
    "send_object": "mpicomm.collective_ops.point_to_point",
    "recv_object": "mpicomm.collective_ops.point_to_point",
    "scatter_object": "mpicomm.collective_ops.point_to_point",
    "Handle": "mpicomm.collective_ops.handles",
    "wait_all": "mpicomm.collective_ops.handles",
    "as_completed": "mpicomm.collective_ops.handles",
    "bootstrap": "mpicomm.runtime",
    "current_world": "mpicomm.session",
    "recover": "mpicomm.recovery",
    "shutdown": "mpicomm.session",
    "World": "mpicomm.session",
    "dump_flight_recorder": "mpicomm.runtime",
    "bf16_compression_hook": "mpicomm.training.parallel",
    "Trainer": "mpicomm.training.trainer",
    "Callback": "mpicomm.training.callbacks",
    "BestCheckpoint": "mpicomm.training.standard_callbacks",
    "EarlyStopping": "mpicomm.training.standard_callbacks",
    "LearningRateLogger": "mpicomm.training.standard_callbacks",
    "EMA": "mpicomm.training.standard_callbacks",
    "CombinedOptimizer": "mpicomm.training.optimizers",
    "Preempted": "mpicomm.training.preemption",
    "prepare": "mpicomm.training.preparation",
    "PreparedLoader": "mpicomm.training.preparation",
    "MpicommError": "mpicomm.errors",
    "MismatchError": "mpicomm.errors",
    "LaunchError": "mpicomm.errors",
    "MPINotFoundError": "mpicomm.errors",
    "DeviceError": "mpicomm.errors",
    "RankFailedError": "mpicomm.errors",
    "RendezvousError": "mpicomm.errors",
    "CheckpointError": "mpicomm.errors",
    "TrainingError": "mpicomm.errors",
}

__all__ = [  # noqa: RUF022  in the order of sorted(), which dir() has too
    "BestCheckpoint",
    "Callback",
    "CheckpointError",
    "CombinedOptimizer",
    "DeviceError",
    "EMA",
    "EarlyStopping",
    "Handle",
    "LaunchError",
    "LearningRateLogger",
    "MPINotFoundError",
    "MismatchError",
    "MpicommError",
    "Preempted",
    "PreparedLoader",
    "RankFailedError",
    "RendezvousError",
    "Trainer",
    "TrainingError",
    "World",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_object",
    "as_completed",
    "barrier",
    "bf16_compression_hook",
    "bootstrap",
    "broadcast",
    "broadcast_object",
    "current_world",
    "dump_flight_recorder",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "prepare",
    "recover",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "shutdown",
    "wait_all",
]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mpicomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_plugin.register_on_import_of_torch()
