"""Synchronization of the ranks between steps: uneven data, reductions, differences. All are collective."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpicomm import agreement
from mpicomm.collective_ops import collectives, group_argument
from mpicomm.errors import TrainingError, raised_on_all_ranks
from mpicomm.recorder import rank_text
from mpicomm.training import randomness
from mpicomm.training.data import DataSource, Step
from mpicomm.training.parallel import DDPModel, FSDPModel

if TYPE_CHECKING:
    from mpicomm.training.step_metrics import StepTimer

_FIRST = "digest of the first sample"  # in the result of begin_epoch
_OF_EQUAL_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the element-wise sum of the values of all ranks, in float64 (collective)."""
    return _reduce(values, dist.ReduceOp.SUM)


def _reduce(values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64, device=group_argument.resolve(None, "the trainer").control)
    dist.all_reduce(numbers, op)
    return numbers.tolist()


def check_equal(values: Mapping[str, object], call: str, remedy: str) -> None:
    """Compare values that must be equal on all ranks (collective).

    Args:
        values: The values of this rank by name.
        call: The call that needs them, for the error.
        remedy: The last line of the error.

    Raises:
        TrainingError: On every rank, if one of them differs. The message has its values by rank.
    """
    _compare(collectives.all_gather_object(dict(values)), call, remedy)


def _compare(values_by_rank: Sequence[Mapping[str, object]], call: str, remedy: str) -> None:
    for name in dict.fromkeys(itertools.chain.from_iterable(values_by_rank)):
        rows = agreement.ranks_by_value([values.get(name) for values in values_by_rank], range(len(values_by_rank)))
        if len(rows) > 1:
            by_rank = ", ".join(f"{value} on {rank_text.name_ranks(ranks)}" for value, ranks in rows.items())
            raise raised_on_all_ranks(
                TrainingError(f"{call}: {name} must be equal on all ranks, got {by_rank}.\n{remedy}")
            )


def agreed_source(
    make: Callable[[], DataSource],
    arguments: Mapping[str, object],
    call: str,
    argument: str,
    shard: str = "shard",
) -> DataSource:
    """Return the data source of this rank, after comparing its layout with those of the other ranks (collective).

    The ranks exchange these, further arguments, and failures at once.

    Args:
        make: Returns the source of this rank.
        arguments: Further arguments of the call by name, which must be equal on all ranks.
        call: The call that takes the data, for the error.
        argument: Its argument for the data.
        shard: Its argument that determines whether the ranks share the data.

    Raises:
        Exception: As `make`.
        TrainingError: On every rank, if the layouts or the arguments differ; on the other ranks, if `make` fails on
            some ranks.
    """
    source: DataSource | None = None
    error: Exception | None = None
    layout: Mapping[str, object] = {}
    try:
        source = make()
        layout = source.layout
    except Exception as caught:  # noqa: BLE001  raised after the other ranks know of it
        error = caught
    own = (None if error is None else str(error), dict(arguments), dict(layout))
    messages, arguments_by_rank, layouts = zip(*collectives.all_gather_object(own), strict=True)
    if error is not None:
        raise error
    assert source is not None
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise raised_on_all_ranks(
            TrainingError(f"{call}: {argument} of {rank_text.name_ranks(failed)}: {messages[failed[0]]}")
        )
    _compare(arguments_by_rank, call, "Pass the same arguments on every rank.")
    _compare(
        [{f"the {name} of {argument}": value for name, value in layout.items()} for layout in layouts],
        call,
        f"Pass the same data on every rank, or set {shard}=False if each rank passes its own share.",
    )
    return source


def aligned_steps(
    source: DataSource, steps: Iterator[Step], padding: Callable[[Step], Step], timer: StepTimer | None = None
) -> Iterator[Step]:
    """Return steps with a total and the same number of batches on all ranks, until no rank has samples (collective).

    Args:
        source: The data.
        steps: The steps of this rank.
        padding: Returns a step of padding, for a rank without samples in a step in which other ranks have some. Its
            argument is the last step that was returned; an empty one before the first.
        timer: Measures the time for data and communication.
    """
    return steps if source.is_counted else _aligned(steps, padding, timer)


def _aligned(steps: Iterator[Step], padding: Callable[[Step], Step], timer: StepTimer | None) -> Iterator[Step]:
    last = Step([])
    while True:
        # 1. load the step, and agree on its numbers of samples and batches
        step = next(steps, Step([]))
        if timer is not None:
            timer.add("data")
        count = int(sum_over_ranks([step.count])[0])
        most_batches = int(_reduce([len(step.batches)], dist.ReduceOp.MAX)[0]) if count else 0
        if timer is not None:
            timer.add("communication")
        if not count:
            return
        # 2. cut or pad it to the same number of batches on all ranks
        last = (step if step.batches else padding(last)).with_length(most_batches)
        last.total = count
        yield last


def begin_epoch(source: DataSource, before: Sequence[Mapping[str, object]] = ()) -> list[dict[str, object]]:
    """Compare the data of an epoch between the ranks, and with those before an interruption (collective).

    Args:
        source: The data, of which `steps` has been called.
        before: The result before the interruption, if the run continues within an epoch.

    Returns:
        What determines the samples of the epoch, by name, for each rank; one entry for data whose samples are counted.

    Raises:
        TrainingError: On every rank, if other samples would remain than before the interruption, or processes that read
            an iterable-style dataset together have read different first samples.
    """
    own = source.order_settings, source.first_samples
    gathered = [own] if source.is_counted else collectives.all_gather_object(own)
    _check_first_samples(source, [first for _, first in gathered])
    now = [{**settings, _FIRST: first and first[1][0].hex()} for settings, first in gathered]
    differences = [
        (rank, name, old_values[name], value)
        for rank, (values, old_values) in enumerate(zip(now, before, strict=False))
        for name, value in values.items()
        if old_values.get(name, value) != value
    ]
    for rank, name, old_value, value in differences:
        if name != _FIRST:
            raise raised_on_all_ranks(
                TrainingError(
                    f"fit: cannot continue within the epoch with other data: the {name} of train_data was "
                    f"{old_value}, got {value} on rank {rank}.\n"
                    f"Pass the same data and arguments until this epoch is complete. Between epochs they can change."
                )
            )
    if differences and dist.get_rank() == 0:
        name, _ = gathered[differences[0][0]][1] or ("", [])
        warnings.warn(
            f"the run continues within an epoch, whose first sample of {name} differs from that before the "
            f"interruption: unless only its augmentation is random, samples of this epoch are repeated or omitted.\n"
            f"If the dataset has a random state of its own, give it a method set_epoch(epoch) that seeds this state, "
            f"or save between epochs only (save_every=None).",
            stacklevel=2,
        )
    return now


def _check_first_samples(source: DataSource, firsts: Sequence[tuple[str, list[bytes]] | None]) -> None:
    digests = [set() if first is None else set(first[1]) for first in firsts]
    several = [rank for rank, own in enumerate(digests) if len(own) > 1]
    others = [rank for rank, own in enumerate(digests) if source.is_shared and own != digests[0]]
    if not source.is_first_compared or not (several or others):
        return
    name, own = next(first for rank, first in enumerate(firsts) if first is not None and rank in {*several, *others})
    if source.is_shared:
        processes = f"rank 0 and {rank_text.name_ranks(others)}" if others else "worker processes"
        message = (
            f"the ranks cannot share the iterable-style dataset {name}: its first sample differs between {processes}.\n"
            f"Set shard=False if it yields the share of each rank (eval_shard=False for eval_data), or shard=True if "
            f"it yields all samples in the same order in every process."
        )
    else:
        message = (
            f"{len(own)} workers cannot share the iterable-style dataset {name}: its first sample differs between them "
            f"on {rank_text.name_ranks(several)}.\n"
            f"Set num_workers=1, or pass a DataLoader of the dataset, which is used unchanged."
        )
    raise raised_on_all_ranks(TrainingError(message))


def padding(source: DataSource, last: Step, device: torch.device) -> Step:
    """Return a step of padding for a rank without samples in a step in which other ranks have some.

    Args:
        source: The data, whose first batch is the padding if there is no last step.
        last: The last step of this rank; an empty one if it has taken none.
        device: The device of this rank, whose random number generators do not change.

    Raises:
        ValueError: If this rank has no data at all.
    """
    if not last.batches:
        with randomness.preserved(device):
            last = source.first()
    if not last.batches:
        raise no_data()
    return last.as_padding()


def no_data() -> ValueError:
    """Return the error of a rank without data, which has no batch to use as padding."""
    return ValueError(
        f"expected data on every rank, got none on rank {dist.get_rank()}.\n"
        f"Pass at least one batch of data on every rank."
    )


def gather_stop_reasons(reason: str | None) -> str:
    """Return the reasons of the stop requests with their ranks, such as `SIGTERM on rank 1` (collective)."""
    reasons = collectives.all_gather_object(reason)
    rows = agreement.ranks_by_value(reasons, range(len(reasons))).items()
    return ", ".join(f"{reason} on {rank_text.name_ranks(ranks)}" for reason, ranks in rows if reason is not None)


def gather_nonfinite_samples(step: Step, is_finite: bool) -> dict[str, Sequence[int]]:
    """Return the known sample indices of the ranks whose loss is not finite, by rank (collective)."""
    own = None if is_finite else [index for batch in step.batches for index in batch.indices or ()]
    gathered = collectives.all_gather_object(own)
    return {str(rank): indices for rank, indices in enumerate(gathered) if indices is not None}


def check_parameters(wrapped: DDPModel | FSDPModel, step: int) -> None:
    """Compare the parameters of all ranks by the sums of their bits as integers (collective).

    With FSDP there is nothing to compare, since each rank has other shards.

    Raises:
        TrainingError: On every rank, if they differ. The message names the ranks and the first parameter that differs.
    """
    if isinstance(wrapped, FSDPModel):
        return
    # 1. compare a digest of the sums
    names = [name for name, _ in wrapped.inner.named_parameters()]
    sums = torch.stack([_sum_of_bits(parameter) for parameter in wrapped.inner.parameters()]).cpu()
    if len(set(collectives.all_gather_object(agreement.digest(sums.numpy().tobytes())))) == 1:
        return
    # 2. find the ranks that differ from the most frequent value
    gathered = torch.stack(collectives.all_gather_object(sums))
    usual = gathered.mode(dim=0).values
    others = [rank for rank, row in enumerate(gathered) if not torch.equal(row, usual)]
    first = names[int((gathered != usual).any(dim=0).nonzero()[0])]
    raise raised_on_all_ranks(
        TrainingError(
            f"after step {step} the parameters of {rank_text.name_ranks(others)} differ from those of the other ranks, "
            f"first in {first}.\n"
            f"Check for code that changes parameters on one rank or skips gradient synchronization, then resume from "
            f"the last checkpoint before step {step}."
        )
    )


def _sum_of_bits(parameter: torch.Tensor) -> torch.Tensor:
    content = parameter.detach().contiguous()
    if content.is_complex():
        content = torch.view_as_real(content)
    return content.view(_OF_EQUAL_SIZE[content.element_size()]).sum(dtype=torch.int64)
