"""The fast path of most all-reduces: on the caller's thread, with all constant attributes looked up in advance.

docs/performance.md breaks down the time of a call in microseconds.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import reductions
from mpicomm.backend.operations import Operations
from mpicomm.backend.torch_internals import AllreduceOptions
from mpicomm.backend.work import CompletedWork
from mpicomm.watchdog import flight_recorder

_MOST_BYTES = 2**31 - 1  # above this, the overhead of the regular path is negligible
_LEAST_BY_NODE = 2**16  # bytes; below this, shared memory is not considered
_KINDS = (torch.Tensor, torch.nn.Parameter)  # exact types only: other subclasses may redefine attributes
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
_SUM: Any = dist.ReduceOp.SUM
_NO_TIME = datetime.timedelta(0)


class FastPath:
    """In-place all-reduce with SUM of the dense CPU tensors of one group."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._executor = operations.executor
        self._record = operations.record
        self._call = operations.comm.Allreduce
        plans = {dtype: reductions.plan(_SUM, dtype, operations.comm.size, "all_reduce") for dtype in _DTYPES}
        self._plans = {dtype: plan for dtype, plan in plans.items() if plan.is_native}
        self._in_place, self._sum = mpi.api().IN_PLACE, mpi.api().SUM
        self._memory_at = mpi.api().memory.fromaddress

    def all_reduce(self, tensors: Any, opts: Any) -> CompletedWork | None:
        """Run an all-reduce on the calling thread (collective).

        Returns:
            The completed work; None, without side effects, if the call does not qualify for the fast path.
        """
        # 1. check that the call qualifies, cheapest conditions first, and take the lock
        if type(opts) is not AllreduceOptions or type(tensors) is not list or len(tensors) != 1:
            return None
        tensor = tensors[0]
        if (
            type(tensor) not in _KINDS
            or tensor.layout is not torch.strided
            or (plan := self._plans.get(dtype := tensor.dtype)) is None
            or (nbytes := tensor.nbytes) > _MOST_BYTES
            or not tensor.is_contiguous()
            or not tensor.is_cpu
            or not (address := tensor.data_ptr())
            or tensor.is_neg()
            or (nbytes >= _LEAST_BY_NODE and tensor.is_inference())
            or opts.asyncOp
            or not opts.reduceOp == _SUM  # noqa: SIM201  torch's type has no fast !=
            or nbytes > self._operations.transport.whole_bytes
            or not self._executor.take_turn()
        ):
            return None
        operation = None
        try:
            count = tensor.numel()
            # 2. record the call. Depth 3: the frames above are one method of the process group, and one more of the
            #    process group or one of torch.
            operation = flight_recorder.note(self._record, "all_reduce", dtype, count, None, False, True, 3)
            if (timeout := opts.timeout) > _NO_TIME:
                operation.limit = timeout.total_seconds()
            # 3. reduce, through the node's shared memory if that accepts the tensor, else by MPI
            if nbytes < _LEAST_BY_NODE or not self._by_node(tensor, plan):
                memory = self._memory_at(address, nbytes)
                self._call(self._in_place, (memory, count, plan.datatype), self._sum)
        except BaseException as error:
            if operation is not None:
                self._executor.mark_broken(operation, error)
            raise
        finally:
            if operation is not None:
                operation.finish()
            self._executor.give_turn_back()
        work = CompletedWork()
        work.tensors = tensors
        return work

    def _by_node(self, tensor: torch.Tensor, plan: reductions.Reduction) -> bool:
        node = self._operations.node
        return node.may_reduce("all_reduce", tensor, plan) and node.all_reduce(tensor, plan)
