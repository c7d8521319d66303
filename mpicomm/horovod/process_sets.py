"""Process sets: groups of ranks, each with an engine of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from mpicomm import arguments, mpi
from mpicomm.horovod.process_set_engine import ProcessSetEngine
from mpicomm.horovod.timeline_file import HorovodTimeline
from mpicomm.horovod.variables import Variables, is_set
from mpicomm.job import session

DYNAMIC_VARIABLE = "HOROVOD_DYNAMIC_PROCESS_SETS"
_RANKS = arguments.Expected(
    "ranks (integers) or an mpi4py communicator",
    lambda _: True,  # Horovod raises a ValueError for other types, too
    is_within=lambda ranks: (
        isinstance(ranks, list) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks)
    ),
    remedy="Pass a list of ranks.",
)


class ProcessSet:
    """A set of ranks that run operations together; pass it as `process_set=`. Its methods do not communicate.

    Attributes:
        process_set_id: A number that is equal on all ranks; None unless the set is registered.
        ranks: The ranks of the set, in ascending order.
        mpi_comm: The mpi4py communicator that was passed, if any.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Describe a set; `hvd.init(process_sets=...)` or `hvd.add_process_set` registers it.

        Args:
            ranks_or_comm: The ranks, or an mpi4py communicator of the ranks.

        Raises:
            ValueError: If it is neither ranks nor a communicator.
        """
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        _RANKS.check(ranks, "ranks_or_comm", "ProcessSet")
        self.ranks = sorted(int(rank) for rank in ranks)  # names contain them: an IntEnum is shown as a word

    def size(self) -> int | None:
        """Return the number of ranks; None unless the set is registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank within the set; None unless the set is registered.

        Raises:
            ValueError: If this rank is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = registry.rank
        if rank not in self.ranks:
            raise ValueError(
                f"rank {rank} is not in the process set of ranks {self.ranks}.\n"
                f"Call rank() only where process_set.included() is true."
            )
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if its ranks are unknown."""
        return None if self.ranks is None else registry.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])


class _Registry:
    """The registered process sets of this process."""

    def __init__(self) -> None:
        self.sets: dict[int, ProcessSet] = {}
        self.engines: dict[int | None, ProcessSetEngine] = {}  # of the sets that contain this rank
        self.timeline = HorovodTimeline()
        self._variables = Variables()
        self._rank = 0
        self._num_registered = 0  # in the current world
        self._recoveries = 0

    @property
    def is_open(self) -> bool:
        """Whether the global process set is registered."""
        return bool(self.sets)

    def check_open(self) -> None:
        """Check that Horovod is initialized.

        Raises:
            ValueError: If it is not.
        """
        if not self.sets:
            raise ValueError("Horovod has not been initialized; use hvd.init().")

    @property
    def rank(self) -> int:
        """This rank in the job.

        Raises:
            ValueError: If Horovod is not initialized.
        """
        self.check_open()
        return self._rank

    def open(self, process_sets: Sequence[ProcessSet]) -> None:
        """Register the global process set and further ones (collective)."""
        world = session.current_world()
        self._rank = world.rank
        if world.recoveries != self._recoveries:
            self._recoveries, self._num_registered = world.recoveries, 0
        self._variables = Variables.from_environ(os.environ)
        # All arguments are checked before the first set is registered: after an error, Horovod is not initialized.
        ranks_of_sets = [list(range(world.size))]
        for index, process_set in enumerate(process_sets):
            ranks = _ranks_of(process_set)
            if ranks in ranks_of_sets:
                raise ValueError(
                    f"init: process_sets[{index}] has the ranks of an earlier set: {process_set}.\nPass each set once."
                )
            ranks_of_sets.append(ranks)
        if self._variables.timeline and world.rank == 0:
            self.timeline.start(self._variables.timeline, marks_cycles=self._variables.marks_cycles)
        self._register(global_process_set, ranks_of_sets[0])
        for process_set, ranks in zip(process_sets, ranks_of_sets[1:], strict=True):
            self._add(process_set, ranks)

    def add(self, process_set: ProcessSet) -> bool:
        """Register a set (collective over all ranks). Returns False if a set of these ranks is registered."""
        ranks = _ranks_of(process_set)
        if any(registered.ranks == ranks for registered in self.sets.values()):
            return False
        self._add(process_set, ranks)
        return True

    def _add(self, process_set: ProcessSet, ranks: list[int]) -> None:
        # The name contains the ranks: ranks that add different sets are reported as a stall.
        self.engines[0].run_barrier(f"add_process_set.{'_'.join(map(str, ranks))}")
        self._register(process_set, ranks)

    def remove(self, process_set: ProcessSet) -> None:
        """Remove a registered set (collective over all ranks)."""
        number = process_set.process_set_id
        assert number is not None  # the caller has checked it
        self.engines[0].run_barrier(f"remove_process_set.{number}")
        self._close(number)

    def close(self) -> None:
        """Shut all sets down (collective)."""
        for number in sorted(self.sets, reverse=True):  # the global set last
            self._close(number)
        self.timeline.stop()

    def _close(self, number: int) -> None:
        self.sets.pop(number).process_set_id = None
        if number in self.engines:
            self.engines.pop(number).close()

    def _register(self, process_set: ProcessSet, ranks: list[int]) -> None:
        # Names of groups are not used twice in a world, also after a shutdown. They are equal on its ranks, although
        # some may have joined in a recovery.
        name = f"horovod:{self._recoveries}:{self._num_registered}"
        number = 0 if process_set is global_process_set else self._num_registered
        self._num_registered += 1
        if self._rank in ranks:
            self.engines[number] = ProcessSetEngine(name, ranks, self._variables, self.timeline)
        process_set.ranks, process_set.process_set_id = ranks, number
        self.sets[number] = process_set


registry = _Registry()


def _ranks_of(process_set: ProcessSet) -> list[int]:
    """Return the ranks in the job of a set that is to be registered."""
    world = session.current_world()
    ranks = process_set.ranks
    if ranks is None:
        assert world.comm is not None  # the user has a communicator of mpi4py
        ranks = sorted(mpi.ranks_within(process_set.mpi_comm, world.comm))
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < world.size for rank in ranks):
        raise ValueError(
            f"process set: ranks must be different ranks from 0 to {world.size - 1}, got {ranks}.\nPass each rank once."
        )
    return ranks


def engine_of(process_set: ProcessSet, function: str) -> ProcessSetEngine:
    """Return the engine of a set.

    Args:
        function: The name of the public function, for the message.

    Raises:
        ValueError: If Horovod is not initialized, the set is not registered, or this rank is not in the set.
    """
    engine = registry.engines.get(process_set.process_set_id)
    if engine is not None:
        return engine
    check_registered(process_set, function)
    raise ValueError(
        f"{function}: rank {registry.rank} is not a member of the process set of ranks {process_set.ranks}.\n"
        f"Call it only where process_set.included() is true."
    )


def check_registered(process_set: ProcessSet, function: str) -> None:
    """Check a set; this rank need not be in it.

    Args:
        function: The name of the public function, for the message.

    Raises:
        ValueError: If Horovod is not initialized, or the set is not registered.
    """
    registry.check_open()
    if process_set.process_set_id is None:
        raise ValueError(
            f"{function}: the process set is not registered: {process_set}.\n"
            f"Call hvd.add_process_set() on all ranks first."
        )


def index_of_root(root_rank: int, process_set: ProcessSet, function: str) -> int:
    """Return the index of a root within a set.

    Args:
        root_rank: The rank in the job.
        function: The name of the public function, for the message.

    Raises:
        ValueError: If `engine_of` raises it, or the root is not in the set.
    """
    ranks = engine_of(process_set, function).ranks
    if root_rank not in ranks:
        raise ValueError(
            f"{function}: root_rank must be one of the ranks {ranks}, got {root_rank!r}.\nPass one of these."
        )
    return ranks.index(root_rank)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set after `hvd.init()`, with HOROVOD_DYNAMIC_PROCESS_SETS=1 (collective over all ranks).

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set.

    Raises:
        ValueError: If Horovod is not initialized, process sets are not dynamic, the ranks are not different ranks of
            the job, or a set of these ranks is registered.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    _check_dynamic("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if not registry.add(process_set):
        raise ValueError(
            f"add_process_set: a process set of ranks {process_set.ranks} is already registered.\n"
            f"Use the registered set, or remove it first by hvd.remove_process_set()."
        )
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, with HOROVOD_DYNAMIC_PROCESS_SETS=1 (collective over all ranks).

    Args:
        process_set: A registered set, but not the global one.

    Returns:
        Whether the set was removed; False for the global set, and for one that is not registered.

    Raises:
        ValueError: If Horovod is not initialized, or process sets are not dynamic.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    if process_set.process_set_id in (None, 0):
        return False
    _check_dynamic("remove_process_set")
    registry.remove(process_set)
    return True


def _check_dynamic(function: str) -> None:
    registry.check_open()
    if not is_set(os.environ, DYNAMIC_VARIABLE):
        raise ValueError(
            f"{function}: process sets are fixed at hvd.init().\n"
            f"Set {DYNAMIC_VARIABLE}=1, or call hvd.init(process_sets='dynamic') on all ranks."
        )
