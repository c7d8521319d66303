"""Horovod's API for PyTorch, on the process groups of this package.

    import mpicomm.horovod as hvd
    hvd.init()

Programs written for `import horovod.torch as hvd` run unchanged; docs/horovod.md lists the differences.
"""
# A name that is imported as itself is public for type checkers, without a second list of the names.
# ruff: noqa: I001  it would write one import for each name

import types

from mpicomm.horovod import elastic as elastic
from mpicomm.horovod.context import (
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    init as init,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rank as rank,
    rocm_built as rocm_built,
    shutdown as shutdown,
    size as size,
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
)
from mpicomm.horovod.functions import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from mpicomm.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from mpicomm.horovod.process_sets import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    global_process_set as global_process_set,
    remove_process_set as remove_process_set,
)
from mpicomm.horovod.submission import (
    Adasum as Adasum,
    Average as Average,
    HorovodInternalError as HorovodInternalError,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
)
from mpicomm.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from mpicomm.horovod.tensor_operations import (
    Compression as Compression,
    allgather as allgather,
    allgather_async as allgather_async,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
    join as join,
    poll as poll,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
    sparse_allreduce_async as sparse_allreduce_async,
    synchronize as synchronize,
)

# For `from mpicomm.horovod import *`: without the modules of this package, whose names a program may use itself. Set in
# this way, because type checkers take a computed `__all__` for an empty one.
globals()["__all__"] = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and (value is elastic or not isinstance(value, types.ModuleType))
]
for _name in globals()["__all__"]:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__  # so that a pickle, such as that of a model, survives moves inside
