"""mpicomm: MPI-first collective communications for PyTorch.

    import mpicomm
    world = mpicomm.bootstrap()

Importing this package imports neither torch nor MPI: the public names are resolved on first use. The import registers
the backend with torch under the name `mpicomm`.
"""

from __future__ import annotations

import importlib

from mpicomm.backend import registration as _registration

__version__ = "0.1.0"

# The public names, and the only list of them: type checkers read these imports as statements, `_module_by_name` reads
# them as a table. `a as a` declares to type checkers that the name is public.
TYPE_CHECKING = False  # type checkers recognise the name; importing typing would take longer than this package
if TYPE_CHECKING:
    from typing import Any

    from mpicomm.collective_ops.collectives import (
        all_gather as all_gather,
        all_gather_object as all_gather_object,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        all_to_all_object as all_to_all_object,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_object as broadcast_object,
        gather as gather,
        gather_object as gather_object,
        reduce as reduce,
        reduce_scatter as reduce_scatter,
    )
    from mpicomm.collective_ops.halo import HaloExchange as HaloExchange
    from mpicomm.collective_ops.handles import (
        Handle as Handle,
        as_completed as as_completed,
        wait_all as wait_all,
    )
    from mpicomm.collective_ops.point_to_point import (
        irecv as irecv,
        isend as isend,
        recv as recv,
        recv_object as recv_object,
        scatter as scatter,
        scatter_object as scatter_object,
        send as send,
        send_object as send_object,
        sendrecv as sendrecv,
    )
    from mpicomm.errors import (
        CheckpointError as CheckpointError,
        DeviceError as DeviceError,
        LaunchError as LaunchError,
        MismatchError as MismatchError,
        MpicommError as MpicommError,
        MPINotFoundError as MPINotFoundError,
        RankFailedError as RankFailedError,
        RendezvousError as RendezvousError,
        TrainingError as TrainingError,
    )
    from mpicomm.job.bootstrap import (
        bootstrap as bootstrap,
        dump_flight_recorder as dump_flight_recorder,
    )
    from mpicomm.job.rank_output import RankFilter as RankFilter, print_rank_0 as print_rank_0
    from mpicomm.job.recovery import recover as recover
    from mpicomm.job.session import World as World, current_world as current_world
    from mpicomm.job.shutdown import shutdown as shutdown
    from mpicomm.training.callbacks import Callback as Callback
    from mpicomm.training.optimizers import CombinedOptimizer as CombinedOptimizer
    from mpicomm.training.parallel import bf16_compression_hook as bf16_compression_hook
    from mpicomm.training.preemption import Preempted as Preempted
    from mpicomm.training.preparation import (
        PreparedLoader as PreparedLoader,
        prepare as prepare,
    )
    from mpicomm.training.standard_callbacks import (
        EMA as EMA,
        BestCheckpoint as BestCheckpoint,
        EarlyStopping as EarlyStopping,
        LearningRateLogger as LearningRateLogger,
    )
    from mpicomm.training.trainer import Trainer as Trainer


_table: dict[str, str] = {}


def _module_by_name() -> dict[str, str]:
    """Return the module of each public name, from the imports above.

    Type checkers need these imports as statements. A dict beside them would list each name a second time.
    """
    if not _table:
        import re

        with open(__file__, encoding="utf-8") as file:  # noqa: PTH123  importing pathlib takes longer than this package
            text = file.read()
        for module, names in re.findall(r"^    from (\S+) import (\([^)]*\)|.*)$", text, re.MULTILINE):
            _table.update(dict.fromkeys(re.findall(r"(\w+) as \1\b", names), module))
    return _table


def __getattr__(name: str) -> Any:
    """Resolve a public name, or `__all__`, on first use."""
    if name == "__all__":
        value: Any = sorted([*_module_by_name(), "__version__"])
    elif name in _module_by_name():
        value = getattr(importlib.import_module(_module_by_name()[name]), name)
    else:
        raise AttributeError(f"module 'mpicomm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))


_registration.register_on_import_of_torch()
