"""Collective calls of the trainer that are run again after ranks have failed, in the world of the remaining ranks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from mpicomm import agreement
from mpicomm.collective_ops import collectives
from mpicomm.errors import RankFailedError, TrainingError, raised_on_all_ranks
from mpicomm.job import recovery, session
from mpicomm.recorder import rank_text
from mpicomm.training import checkpoint, randomness, state
from mpicomm.training.assembly import Assembly
from mpicomm.training.data import DataSource
from mpicomm.training.preemption import Preempted
from mpicomm.training.shard_replicas import Held, ShardReplicas
from mpicomm.training.state import Position
from mpicomm.watchdog import rank_failures

T = TypeVar("T")


class RecoveringCalls:
    """Runs the collective calls of a trainer. If ranks fail, recovers the world and runs the call again.

    A spare that joins runs the program from its start. The calls that the other ranks have completed then return their
    recorded results, so that the spare arrives at the call in which the other ranks are.
    """

    def __init__(self, assembly: Assembly, replicas: ShardReplicas | None, seed: int) -> None:
        """Prepare the calls.

        Args:
            assembly: The objects of the trainer, which are made again in each world.
            replicas: The copies of the shards of a sharded model, if it has any.
            seed: The seed of the run.
        """
        self.has_begun = False
        """Whether the run has started or resumed: from then on the newest state is in memory, not in a checkpoint."""

        self.first_size = session.current_world().size
        """The number of ranks at the start of the job."""

        self.last_step_at: float | None = None
        """The time at which this rank completed its last step, as of `time.time()`."""

        self.recovery: Recovery | None = None
        """The recoveries since the last step, if any."""

        self.has_lost_state = False
        """Whether a sharded model has lost its parameters, and no copies or checkpoint have restored them yet."""

        self._assembly, self._replicas, self._seed = assembly, replicas, seed
        self._number = next(_numbers)  # of this trainer in the program, from 0
        self._is_synchronized = False  # has the parameters that all ranks agreed on
        self._failures: list[Failure] = []  # since the last step
        self._results: list[Any] = []  # of the calls that all ranks have completed, in order
        self._returned = 0

    def enter_world(self) -> None:
        """Assemble the trainer in the current world, or in the next one if ranks fail meanwhile (collective)."""
        _, failure = _attempted_by_all(self._enter_world)
        self._recover(failure)

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a collective call, which is run again after each recovery (collective)."""
        self._returned += 1
        if self._returned <= len(self._results):
            return cast("T", self._results[self._returned - 1])
        while True:
            outcome, failure = _attempted_by_all(call)
            if failure is None:
                self._results.append(copy.deepcopy(outcome))
                return cast("T", outcome)
            self._recover(failure)

    def begin(self) -> None:
        """Note that the run has started or resumed, with a state of its own or from a checkpoint (on all ranks)."""
        self.has_begun, self.has_lost_state = True, False

    def check_state(self) -> None:
        """Check that the model has its parameters.

        Raises:
            TrainingError: On every rank, if a sharded model has lost its parameters.
        """
        if self.has_lost_state:
            raise raised_on_all_ranks(
                TrainingError(
                    "cannot continue after the failure: each rank had a part of the model, and there is no copy of the "
                    "failed rank's part.\n"
                    "Start the job again. Trainer continues from the newest checkpoint (checkpoint_dir, save_every) if "
                    "there is one, or from the copies of replicate_shards=True unless the next rank failed."
                )
            )

    def check_source(self, source: DataSource) -> None:
        """Check that the ranks of this world have all of the data.

        Raises:
            TrainingError: On every rank, if each rank has its own share of the data and there are fewer ranks than at
                the start.
        """
        size = self._assembly.world.size
        if not source.is_shared and size != self.first_size:
            raise raised_on_all_ranks(
                TrainingError(
                    f"cannot continue on {size} of {self.first_size} ranks: each rank has its own share of the data, "
                    f"so the samples of the failed ranks are unknown.\n"
                    f"Start the job with spares (mpicomm run --spares), or let the ranks share the data (shard=True)."
                )
            )

    def seed_at(self, point: str, number: int) -> None:
        """Seed the generators for a point of the run, which may be repeated, or run by a spare."""
        randomness.seed_at(point, self._seed, number, self._assembly.world.rank)

    def refresh_replicas(self, *, only_if_due: bool = False) -> None:
        """Refresh the copies of the shards, if the trainer has any (collective)."""
        if self._replicas is not None:
            self._replicas.refresh(self._assembly, only_if_due=only_if_due)

    def count_step(self) -> None:
        """Note that this rank has completed a step."""
        self.last_step_at = time.time()
        self._failures.clear()
        self.recovery = None

    def _recover(self, failure: RankFailedError | None) -> None:
        """Enter the next world after a failure, and further ones if ranks fail meanwhile (collective)."""
        while failure is not None:
            self._failures.append(Failure(failure.ranks, failure.hosts, failure.reason, time.time()))
            recovery.recover()
            _, failure = _attempted_by_all(self._enter_world)

    def _enter_world(self) -> None:
        world = session.current_world()
        self._assembly.assemble(world)
        if not self._assembly.has_values and not self.has_begun:
            self.has_lost_state = True  # a failure before the run began: there are no copies of the parameters yet
        progress = (self.has_begun, *self._assembly.position.progress) if self._is_synchronized else None
        has_joined = world.previous_rank is None
        held = () if self._replicas is None else self._replicas.held
        own = Standing(self._number, progress, self.last_step_at, tuple(self._failures), has_joined, held)
        agreed = decide(collectives.all_gather_object(own))
        send(agreed, self._collect, self._load, world.device)
        if self._assembly.is_sharded and (self.has_begun or self.has_lost_state):
            self.has_lost_state = self._replicas is None or not self._replicas.restore(
                self._assembly, [standing.held for standing in agreed.standings]
            )
            self.has_begun = self.has_begun and not self.has_lost_state
        if self._replicas is not None and not self.has_begun and not self.has_lost_state:
            self._replicas.refresh(self._assembly, has_callbacks=False)
        self._is_synchronized = True
        self.recovery = agreed.recovery(self._assembly.position, world.size)

    def _collect(self) -> Any:
        return {
            "state": {} if self._assembly.is_sharded else state.collect_replicated(self._assembly),
            "has_begun": self.has_begun,
            "has_lost_state": self.has_lost_state,
            "first_size": self.first_size,
            "results": self._results,
        }

    def _load(self, content: Any) -> None:
        if not self._assembly.is_sharded:
            state.load_replicated(self._assembly, content["state"])
        self.has_begun, self.has_lost_state = content["has_begun"], content["has_lost_state"]
        self.first_size, self._results = content["first_size"], content["results"]


def _attempted_by_all(call: Callable[[], T]) -> tuple[T | None, RankFailedError | None]:
    """Return the result of a collective call, or the failure that has interrupted it on any rank (collective).

    A failure at the end of a call may interrupt it on some ranks only. The ranks on which it does take part in the
    agreement, too: otherwise the others would wait there for them, while they wait in `recover()`.

    Raises:
        Preempted: On every rank, if the call raises it.
    """
    comm, failures = session.current_world().comm, rank_failures.current()
    assert comm is not None
    preempted, result, failure = None, None, None
    try:
        result, failure = _attempted(call)
    except Preempted as caught:
        preempted = caught
    if not agreement.succeeded_on_all(comm, failure is None) and failure is None:
        assert failures is not None
        failures.wait_until_known()
        failure = failures.error()
    if preempted is not None and failure is None:
        raise preempted
    return result, failure


def _attempted(call: Callable[[], T]) -> tuple[T | None, RankFailedError | None]:
    """Return the result of a collective call, or the failure of ranks that has interrupted it.

    The error itself is released here: the frames of its traceback hold the wrapped model of the old world.
    """
    try:
        return call(), None
    except Exception as error:
        failure = error if isinstance(error, RankFailedError) else rank_failures.error_after(error)
        if failure is None:
            raise
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    return None, failure


# -- the newest state --------------------------------------------------------------------------------------------------


Progress = tuple[int, ...]
"""Numbers that are greater at later points of a run."""

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Failure:
    """Ranks that failed at one time."""

    ranks: tuple[int, ...]
    """Their ranks in the world that they were in."""

    hosts: tuple[str, ...]
    reason: str
    detected_at: float
    """As of `time.time()`."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The recoveries between two steps."""

    failures: tuple[Failure, ...]
    joined: tuple[int, ...]
    """The ranks that spares have taken in the latest recovery."""

    size: int
    """The number of ranks that continue."""

    position: Position
    """A copy of the position at which they continue."""

    last_step_at: float
    """The time of the last step before, or of the first failure if no step was complete, as of `time.time()`."""

    def describe(self, gap: float) -> str:
        """Return the recovery in one line.

        Args:
            gap: The seconds without a complete step.
        """
        failed = "; ".join(
            f"{rank_text.name_ranks(failure.ranks)} on {', '.join(sorted(set(failure.hosts)))} failed: {failure.reason}"
            for failure in self.failures
        )
        joined = f", {len(self.joined)} of them spares" if self.joined else ""
        return (
            f"{failed}; continued from step {self.position.step} on {self.size} ranks{joined}, after {gap:.2f} s "
            f"without a step"
        )


@dataclasses.dataclass(frozen=True)
class Standing:
    """The part of the state of a run that a rank has."""

    trainer: int
    """The number of the trainer in the program."""

    progress: Progress | None
    """None on a rank without a state."""

    last_step_at: float | None = None
    """The time at which this rank completed its last step, as of `time.time()`."""

    failures: tuple[Failure, ...] = ()
    """The failures since its last step."""

    has_joined: bool = False
    """Whether the rank is a spare that has just joined."""

    held: tuple[Held, ...] = ()
    """The shards of a sharded model that this rank holds."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of the agreement: the rank that sends the newest state, and the ranks that lack it."""

    standings: Sequence[Standing]
    source: int
    """The lowest rank that has the newest state."""

    @property
    def ranks_without(self) -> tuple[int, ...]:
        """The ranks that lack the newest state. A rank without any lacks it also if no rank has one."""
        newest = self.standings[self.source].progress
        return tuple(
            rank
            for rank, standing in enumerate(self.standings)
            if rank != self.source and (standing.progress is None or standing.progress != newest)
        )

    @property
    def joined(self) -> tuple[int, ...]:
        """The spares that have just joined."""
        return tuple(rank for rank, standing in enumerate(self.standings) if standing.has_joined)

    def recovery(self, position: Position, size: int) -> Recovery | None:
        """Return the recovery since the last step; None if no rank has failed."""
        failures, last_step_at = self.standings[self.source].failures, self.standings[self.source].last_step_at
        if not failures:
            return None
        begun = failures[0].detected_at if last_step_at is None else last_step_at
        return Recovery(failures, self.joined, size, dataclasses.replace(position), begun)


def decide(standings: Sequence[Standing]) -> Agreement:
    """Return the agreement from the standings of all ranks.

    If no rank has a state, the source is rank 0, whose parameters every new run takes over.

    Raises:
        TrainingError: On every rank, if a spare has joined in another trainer of the program.
    """
    numbers = sorted({standing.trainer for standing in standings})
    if len(numbers) > 1:
        raise raised_on_all_ranks(
            TrainingError(
                f"a spare joined in trainer {numbers[0] + 1} of the program while the other ranks were in trainer "
                f"{numbers[-1] + 1}.\n"
                f"Create one Trainer per program if the job has spares; several calls of fit() are possible."
            )
        )
    newest = max((standing.progress for standing in standings if standing.progress is not None), default=None)
    return Agreement(standings, [standing.progress for standing in standings].index(newest))


def send(agreed: Agreement, collect: Callable[[], Any], load: Callable[[Any], None], device: torch.device) -> None:
    """Send the newest state to the ranks that lack it (collective).

    The state of a rank is replaced after the new one has arrived completely. Tensors are sent one by one, so that a
    rank that has the state already allocates memory for one tensor only.

    Args:
        agreed: The agreement.
        collect: Returns the state of this rank; called on the source.
        load: Loads a state; called on the ranks that lack it.
        device: The device of this rank.
    """
    if not agreed.ranks_without:
        return
    rank = dist.get_rank()
    packed, tensors = checkpoint.pack(collect()) if rank == agreed.source else (b"", [])
    kinds = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    packed, kinds = collectives.broadcast_object((packed, kinds), src=agreed.source)
    lacks = rank in agreed.ranks_without
    received = []
    for number, (shape, dtype, kind) in enumerate(kinds):
        if rank == agreed.source:
            tensor = tensors[number].contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device if kind == device.type else kind)
        dist.broadcast(tensor, agreed.source)
        if lacks:
            received.append(tensor)
    if lacks:
        load(checkpoint.unpack(packed, received))
