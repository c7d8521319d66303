"""Creates the groups of PyTorch's test files with the backend under test, on the ranks of this job.

The files create groups of several backends: `gloo` in processes that a test starts, `threaded` in its threads, and
`fake`, which does not communicate, in the only process.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.conformance import verdicts

_REPLACED = ("gloo", "mpi", "threaded", "fake")


class NeedsRanksError(unittest.SkipTest):
    """A test needs another number of ranks than this job has."""

    def __init__(self, ranks: int) -> None:
        super().__init__(verdicts.needs_ranks(ranks))


class GroupCreation:
    """Replaces the functions of torch that create groups, in this process only."""

    def __init__(self, backend: str, rank: int, size: int) -> None:
        self._backend = backend
        self._rank = rank
        self._size = size
        self._scratch = Path()
        self._check: Callable[[Any], None] = lambda _: None
        self._stores = 0

    def start_test(self, scratch: Path, check: Callable[[Any], None]) -> None:
        """Use an empty directory for the stores of the next test, and check its default groups."""
        self._scratch, self._check, self._stores = scratch, check, 0

    def install(self) -> None:
        create: Any = distributed_c10d.init_process_group
        helper: Any = distributed_c10d._new_process_group_helper

        @functools.wraps(create)
        def init_process_group(
            backend: Any = None,
            init_method: Any = None,
            timeout: Any = None,
            world_size: int = -1,
            rank: int = -1,
            store: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if world_size not in (-1, self._size):
                raise NeedsRanksError(world_size)
            if init_method is None and not isinstance(store, dist.FileStore):  # a store of one process
                store = self._make_store()
            create(self._backend, init_method, timeout, self._size, self._rank, store, *args, **kwargs)
            self._check(dist.group.WORLD)

        @functools.wraps(helper)
        def new_group_helper(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = dist.Backend(self._backend) if str(backend) in _REPLACED else backend
            return helper(size, rank, ranks, chosen, *args, **kwargs)

        dist.init_process_group = distributed_c10d.init_process_group = init_process_group
        distributed_c10d._new_process_group_helper = new_group_helper

    def _make_store(self) -> dist.Store:
        self._stores += 1
        return dist.FileStore(str(self._scratch / f"store-{self._stores}"), self._size)
