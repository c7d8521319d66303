"""Redirects the names of PyTorch's own backends to mpicomm, in this process only."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_distributed import DistTestCases

from mpicomm.backend import registration
from mpicomm.backend.process_group import MPIProcessGroup

OURS = registration.NAME
BUILT_IN = ("mpi", "gloo")
_PREFIX = "conformance_"


def route(labels: Collection[str] = BUILT_IN) -> None:
    """Create every group requested under one of torch's names with the mpicomm backend, under the requested name."""
    registration.register()
    for feature in ("plugin", "ddp", "subgroup", "gpu", "cuda"):  # PyTorch's tests require this of other backends
        DistTestCases.backend_feature[feature].add(OURS)
    for label in labels:
        create = functools.partial(_create, label)
        dist.Backend.register_backend(_PREFIX + label, create, extended_api=True, devices=["cpu", "cuda"])
    distributed_c10d._new_process_group_helper = _routed(distributed_c10d._new_process_group_helper, labels)
    modules: tuple[Any, ...] = (dist, distributed_c10d)
    for module in modules:
        module.is_mpi_available = lambda: True


def check_engine(group: Any, *, is_ours: bool) -> None:
    """Fail if a group does not use the backend under test."""
    if isinstance(group, MPIProcessGroup) != is_ours:
        raise AssertionError(f"the group is a {type(group).__name__}, which is not the backend under test")


def _create(label: str, options: Any, _backend_options: Any) -> MPIProcessGroup:
    return registration.create(options, label)


def _routed(helper: Callable[..., Any], labels: Collection[str]) -> Callable[..., Any]:
    def make(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        label = str(backend)
        asked = dist.Backend(_PREFIX + label) if label in labels else backend
        group, store = helper(size, rank, ranks, asked, *args, **kwargs)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            check_engine(group, is_ours=True)
            _rename(group, label, store)
        return group, store

    return make


def _rename(group: Any, label: str, store: Any) -> None:
    """Register a group in torch's tables under the requested name."""
    backend = dist.Backend(label)
    distributed_c10d._world.pg_map[group] = (backend, store)
    distributed_c10d._world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(backend))
    if label == "gloo":
        # DDP's logger queries Gloo's threads of a group of this name. On the meta device, Gloo gets no other calls.
        dist.ProcessGroup._register_backend(group, torch.device("meta"), dist.ProcessGroup.BackendType.GLOO, _alone())


@functools.cache
def _alone() -> Any:
    """Return a Gloo backend that is connected to no other rank."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=1))
