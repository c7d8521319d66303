"""The table of the collective operations of torch's process groups.

Each row declares one method: its arguments, the checks of them, which tensors it reads and writes, and its algorithm.
From a row follow the method of the process group (process_group.py) and, for each call, a `Collective`: what the
executor runs and records, what the profiler shows, and what the ranks compare in debug mode.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.backend import checks, dispatcher
from mpicomm.backend.gpu.transport import Call, Transport, Use
from mpicomm.backend.transfer import buffers, dtypes, mpi_calls, reductions
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.backend.transfer.dense_collectives import DenseCollectives
from mpicomm.backend.transfer.reductions import Reduction
from mpicomm.torch_internals import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

_READ = Use(reads=True, writes=False)
_WRITTEN = Use(reads=False, writes=True)
_IN_PLACE = Use(reads=True, writes=True)
_SPREAD_READ = Use(reads=True, writes=False, is_spread=True)
_SPREAD_WRITTEN = Use(reads=False, writes=True, is_spread=True)

# -- one call ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CollectiveStep:
    """A part of a collective that runs on its own: one for each tensor of a coalesced operation."""

    run: Callable[..., None]
    """Runs the step on dense tensors in memory that MPI can access, in the order of `tensors`."""

    tensors: Tensors
    """The tensors of the call, of any layout and on any device."""

    uses: Sequence[Use]
    """How the step uses each tensor."""

    num_blocks: int | None
    """The largest number of per-rank blocks in a tensor on any rank; None if not all ranks know the tensors' sizes."""

    def prepared(self, transport: Transport) -> Call:
        """Return the call that runs the step; tensors that are not dense are packed now, on the caller's thread."""
        make = functools.partial(_packed, self.run, self.uses)
        return transport.prepare(make, self.tensors, self.uses, num_blocks=self.num_blocks)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a collective operation."""

    name: str
    steps: Sequence[CollectiveStep]

    results: Tensors
    """The tensors that the operation writes on this rank."""

    inputs: Tensors
    """The tensors that the profiler reports."""

    compared: Tensors
    """The tensors to compare between ranks: equal dtypes, and equal shapes unless `sizes_may_differ`."""

    root: int | None
    signature_suffix: str
    """Further text that must be equal on all ranks."""

    sizes_may_differ: bool

    @property
    def count(self) -> int:
        """The number of elements to record."""
        return sum(tensor.numel() for tensor in self.compared)

    @property
    def signature(self) -> str:
        """The text that must be equal on all ranks, e.g. `broadcast float32[4] (root: rank 0 of the group)`."""
        shapes = ["" if self.sizes_may_differ else str(list(tensor.shape)) for tensor in self.compared]
        tensors = [dtypes.short(tensor.dtype) + shape for tensor, shape in zip(self.compared, shapes, strict=True)]
        root = "" if self.root is None else f"(root: rank {self.root} of the group)"
        return " ".join(filter(None, [self.name, self.signature_suffix, ", ".join(tensors), root]))

    def prepared(self, transport: Transport) -> Call:
        """Return the call that runs all steps in order."""
        calls = [step.prepared(transport) for step in self.steps]
        return calls[0] if len(calls) == 1 else functools.partial(_run_all, calls)


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _packed(run: Callable[..., None], uses: Sequence[Use], *tensors: torch.Tensor) -> Call:
    """Return a call that runs a step on dense tensors, with the content of those that it reads."""
    if all(buffers.is_dense(tensor) for tensor in tensors):
        return functools.partial(run, *tensors)
    dense = [
        buffers.pack(tensor) if use.reads else buffers.output_buffer(tensor)
        for tensor, use in zip(tensors, uses, strict=True)
    ]

    def call() -> None:
        run(*dense)
        for buffer, tensor, use in zip(dense, tensors, uses, strict=True):
            if use.writes:
                buffers.unpack(buffer, tensor)

    return call


# -- rows of the table -------------------------------------------------------------------------------------------------


class Side(enum.Enum):
    """How an algorithm takes the outputs, or the inputs, of a call on this rank."""

    NONE = "in place: the outputs are the inputs"
    TENSOR = "one tensor"
    BLOCKS = "one tensor with a block for each rank"
    LIST = "a list with a tensor for each rank"


Pairs = Sequence[tuple[Tensors, Tensors]]
"""The outputs and the inputs of each step of a call; on ranks other than the root, its lists are empty."""


@dataclasses.dataclass(frozen=True)
class CollectiveOperation:
    """A row of the table: a collective method of torch's process groups."""

    method: str
    """torch's name of the method since version 2.13; `torch_internals.RENAMED` has older ones."""

    name: str
    """Its name in the flight recorder, in the profiler and in debug mode."""

    options: type
    check: Callable[..., Pairs]
    """Checks the arguments of a call, and returns its tensors; its parameters are those of the method."""

    algorithm: Callable[..., None]
    output: Side
    source: Side
    documentation: str
    public_name: str = ""
    """The function of torch.distributed that errors name; empty for `name`."""

    root: str = ""
    """The parameter of torch.distributed that selects the root, "src" or "dst"; empty for an operation without root."""

    reduces: bool = False
    list_parameter: str = ""
    """The parameter of torch.distributed that is the list, for errors."""

    sizes_may_differ: bool = False
    """Whether the sizes of tensors may differ between ranks, and not every rank knows all of them."""

    compares_outputs: bool = False
    """Whether the ranks compare the outputs; otherwise the inputs."""

    operator_forms: Sequence[Callable[[Any], Any]] = ()
    """For each tensor argument, the form in which torch's operator takes it; empty if torch has no operator."""

    @functools.cached_property
    def parameters(self) -> Sequence[str]:
        """The parameters of the method before the options."""
        return [*inspect.signature(self.check).parameters][1:]

    @functools.cached_property
    def fields(self) -> Sequence[str]:
        """The parameters of torch's older signatures in place of the options, in their order."""
        return [*(["root"] if self.root else []), *(["op"] if self.reduces else []), "timeout"]

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The signature of the method: `opts` is also the first field, and the other fields follow it.

        In torch's overloads, `allreduce(tensors, opts)` and `allreduce(tensors, op, timeout)`, the names differ too.
        """
        of_check = [*inspect.signature(self.check).parameters.values()][1:]
        tensors = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in of_check]
        first, *others = self.fields
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        options = [inspect.Parameter(name, kind, default=None) for name in ("opts", *(others or [first]))]
        if others:
            options.append(inspect.Parameter(first, inspect.Parameter.KEYWORD_ONLY, default=None))
        return inspect.Signature([inspect.Parameter("self", kind), *tensors, *options])

    def bind(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the arguments of `check`, and the options, of a call of the method."""
        count = len(self.parameters)
        if not keywords and len(args) == count + 1 and type(args[count]) is self.options:  # torch's own calls
            return dict(zip(self.parameters, args, strict=False)), args[count]
        name = self.public_name or self.name
        try:
            bound = self.signature.bind(None, *args, **keywords)
        except TypeError as error:
            raise TypeError(f"{name}: {error}.\nThe method is {self.method}{self.signature}.") from None
        bound.apply_defaults()
        arguments = {parameter: bound.arguments[parameter] for parameter in self.parameters}
        fields = {field: bound.arguments[field] for field in self.fields}
        return arguments, options_of(name, self.options, bound.arguments["opts"], fields)

    def describe(self, dense: DenseCollectives, opts: Any, arguments: Mapping[str, Any]) -> Collective:
        """Check the arguments of a call, before any communication, and return the call."""
        call = _CallInProgress(self, dense, opts)
        pairs = self.check(call, **arguments)
        if call.is_sparse:
            return _sparse_all_reduce(call, pairs[0][0][0])
        results = [tensor for outputs, _ in pairs for tensor in outputs]
        inputs = results if self.source is Side.NONE else [tensor for _, sources in pairs for tensor in sources]
        steps = [call.step(*pair) for pair in pairs]
        compared = results if self.compares_outputs else inputs
        return Collective(
            self.name, steps, results, inputs, compared, call.root, call.signature_suffix, call.sizes_may_differ
        )


_FIELDS: Mapping[str, tuple[str, type[Any] | tuple[type[Any], ...], str]] = {
    "root": ("rootRank", numbers.Integral, "an int"),
    "op": ("reduceOp", (dist.ReduceOp, dist.ReduceOp.RedOpType), "a ReduceOp"),
    "timeout": ("timeout", datetime.timedelta, "a timedelta"),
}
"""The name in torch's options, the types and their description of each field."""


def options_of(operation: str, kind: type, opts: Any, fields: Mapping[str, Any]) -> Any:
    """Return the options of a call.

    Args:
        operation: The name of the operation, for errors.
        kind: The class of the options.
        opts: Options; a value of the first field, as in torch's older signatures; or None.
        fields: The fields of torch's older signatures, in their order; None selects the default.
    """
    given = {field: value for field, value in fields.items() if value is not None}
    is_complete = isinstance(opts, kind)
    first = next(iter(fields))
    if opts is not None and (given if is_complete else first in given):
        raise TypeError(f"{operation}: got opts and also {', '.join(given)}.\nPass each value once.")
    if is_complete:
        return opts
    made = kind()
    for field, value in (given if opts is None else {first: opts} | given).items():
        attribute, types, description = _FIELDS[field]
        if not isinstance(value, types):
            raise TypeError(
                f"{operation}: expected {description} for {field}, got {type(value).__name__}.\n"
                f"Pass it, or {kind.__name__} for opts."
            )
        setattr(made, attribute, value)
    return made


class _CallInProgress:
    """A call whose arguments the functions below check; each error names the operation and the argument."""

    def __init__(self, row: CollectiveOperation, dense: DenseCollectives, opts: Any) -> None:
        self.row, self.dense, self.opts = row, dense, opts
        self.rank, self.size = dense.rank, dense.size
        self.public_name = row.public_name or row.name
        self.root = checks.require_rank(opts.rootRank, self.size, self.public_name, row.root) if row.root else None
        self.is_root = self.root in (None, self.rank)  # without a root, every rank has the tensors of a root
        self.sizes_may_differ = row.sizes_may_differ
        self.is_sparse = False
        self.signature_suffix = ""
        self.counts: dict[str, Sequence[int]] = {}

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """Return how to reduce tensors of a dtype."""
        return reductions.reduction_for(
            self.opts.reduceOp, dtype, self.size, self.public_name, is_sparse=self.is_sparse
        )

    def step(self, outputs: Tensors, sources: Tensors) -> CollectiveStep:
        """Return the step of the call on one pair of outputs and inputs."""
        row = self.row
        settings: dict[str, Any] = {**self.counts, **({} if self.root is None else {"root": self.root})}
        if row.reduces:
            reduction = self.reduction((outputs or sources)[0].dtype)
            settings["reduction"], self.signature_suffix = reduction, reduction.name
        run = functools.partial(row.algorithm, self.dense, **settings)
        if row.source is Side.NONE:
            of_root, of_others = (_IN_PLACE, _READ) if row.reduces else (_READ, _WRITTEN)  # otherwise a broadcast
            use = of_root if self.is_root else of_others
            return CollectiveStep(run, outputs, (use,), 1)
        output_use = _SPREAD_WRITTEN if row.output is Side.BLOCKS and not self.sizes_may_differ else _WRITTEN
        source_use = _SPREAD_READ if row.source is Side.BLOCKS and not self.sizes_may_differ else _READ
        uses = [*[output_use] * len(outputs), *[source_use] * len(sources)]
        # Ranks that know each other's sizes cut their tensors alike where they are staged in chunks.
        blocks = outputs if row.output is Side.LIST else sources if row.source is Side.LIST else ()
        is_even = not self.sizes_may_differ and buffers.uneven_counts(blocks) is None

        def run_on_sides(*tensors: torch.Tensor) -> None:
            of_outputs, of_sources = tensors[: len(outputs)], tensors[len(outputs) :]
            run(
                of_outputs if row.output is Side.LIST else next(iter(of_outputs), None),
                of_sources if row.source is Side.LIST else of_sources[0],
            )

        return CollectiveStep(run_on_sides, [*outputs, *sources], uses, self.size if is_even else None)


# -- checks ------------------------------------------------------------------------------------------------------------


def _in_place(call: _CallInProgress, tensors: Any) -> Pairs:
    return [([checks.require_single_output(tensors, call.public_name)], [])]


def _in_place_or_sparse(call: _CallInProgress, tensors: Any) -> Pairs:
    tensor = tensors if isinstance(tensors, torch.Tensor) else checks.require_single(tensors, call.public_name)
    if getattr(tensor, "layout", None) != torch.sparse_coo:
        return [([checks.require_output(tensor, call.public_name)], [])]
    call.is_sparse = True
    return [([checks.require_known_device(tensor, call.public_name)], [])]


def _all_in_place(call: _CallInProgress, tensors: Tensors) -> Pairs:
    tensors = [
        checks.require_output(tensor, call.public_name) for tensor in checks.require_nonempty(tensors, call.public_name)
    ]
    checks.require_distinct(tensors, call.public_name, "tensors")
    return [([tensor], []) for tensor in tensors]


def _blocks(call: _CallInProgress, output: torch.Tensor, source: torch.Tensor) -> Pairs:
    return _all_blocks(call, [output], [source])


def _all_blocks(call: _CallInProgress, outputs: Tensors, inputs: Tensors) -> Pairs:
    if len(outputs) != len(checks.require_nonempty(inputs, call.public_name)):
        raise ValueError(
            f"{call.public_name}: got {len(outputs)} outputs for {len(inputs)} inputs.\nPass one output for each input."
        )
    outputs = [checks.require_output(tensor, call.public_name) for tensor in outputs]
    inputs = [checks.require_tensor(tensor, call.public_name) for tensor in inputs]
    if len(outputs) > 1:
        checks.require_distinct(outputs, call.public_name, "output")
        checks.require_unread_by_others(outputs, inputs, call.public_name)
    for output, source in zip(outputs, inputs, strict=True):
        if call.row.output is Side.BLOCKS:
            checks.require_multiple_of(output, source, call.size, call.public_name, "output", "input")
        else:
            checks.require_multiple_of(source, output, call.size, call.public_name, "input", "output")
    return [([output], [source]) for output, source in zip(outputs, inputs, strict=True)]


def _blocks_of_root(call: _CallInProgress, output: torch.Tensor | None, source: torch.Tensor) -> Pairs:
    source = checks.require_tensor(source, call.public_name)
    if not call.is_root:
        return [([], [source])]
    output = checks.require_output(output, call.public_name)
    checks.require_multiple_of(output, source, call.size, call.public_name, "output", "input")
    return [([output], [source])]


def _list_of_outputs(call: _CallInProgress, outputs: Any, inputs: Any) -> Pairs:
    source = checks.require_single_tensor(inputs, call.public_name)
    if not call.is_root:
        return [([], [source])]
    targets = _list(call, checks.require_single_list(outputs, call.public_name), source, are_written=True)
    checks.require_distinct(targets, call.public_name, call.row.list_parameter)
    return [(targets, [source])]


def _list_of_inputs(call: _CallInProgress, outputs: Any, inputs: Any) -> Pairs:
    output = checks.require_single_output(outputs, call.public_name)
    sources = _list(call, checks.require_single_list(inputs, call.public_name), output) if call.is_root else []
    return [([output], sources)]


def _list(call: _CallInProgress, tensors: Any, own: torch.Tensor, *, are_written: bool = False) -> Tensors:
    """Return a list with a tensor for each rank, where this rank's is as large as its other tensor."""
    tensors = checks.require_one_per_rank(
        tensors, call.size, call.public_name, call.row.list_parameter, are_written=are_written
    )
    checks.require_matching(tensors, own, call.rank, call.public_name, call.row.list_parameter)
    return tensors


def _several_lists_of_outputs(call: _CallInProgress, outputs: Sequence[Tensors], inputs: Tensors) -> Pairs:
    sources = [
        checks.require_tensor(tensor, call.public_name) for tensor in checks.require_nonempty(inputs, call.public_name)
    ]
    checks.require_lists_per_rank(outputs, call.size, len(sources), call.public_name, "output_tensor_lists")
    targets = [
        [checks.require_output(of_rank[i], call.public_name) for of_rank in outputs] for i in range(len(sources))
    ]
    all_targets = [tensor for of_source in targets for tensor in of_source]
    checks.require_distinct(all_targets, call.public_name, "outputs")
    checks.require_unread_by_others(all_targets, sources, call.public_name)
    for index, (of_source, source) in enumerate(zip(targets, sources, strict=True)):
        checks.require_matching(of_source, source, call.rank, call.public_name, f"output_tensor_lists[...][{index}]")
    return [(of_source, [source]) for of_source, source in zip(targets, sources, strict=True)]


def _two_lists(call: _CallInProgress, outputs: Tensors, inputs: Tensors) -> Pairs:
    call.signature_suffix = "list"
    outputs = checks.require_one_per_rank(outputs, call.size, call.public_name, "output_tensor_list", are_written=True)
    inputs = checks.require_one_per_rank(inputs, call.size, call.public_name, "input_tensor_list")
    for tensor in [*outputs, *inputs]:
        checks.require_same_dtype(tensor, inputs[0], call.public_name, "a list")
    checks.require_same_own_count(buffers.counts(outputs), buffers.counts(inputs), call.rank, call.public_name)
    checks.require_distinct(outputs, call.public_name, "output_tensor_list")
    return [(outputs, inputs)]


def _rows(
    call: _CallInProgress,
    output: torch.Tensor,
    source: torch.Tensor,
    output_split_sizes: Sequence[int] = (),
    input_split_sizes: Sequence[int] = (),
) -> Pairs:
    output, source = checks.require_output(output, call.public_name), checks.require_tensor(source, call.public_name)
    checks.require_same_dtype(output, source, call.public_name, "output")
    counts = checks.require_splits(output_split_sizes, output, call.size, call.public_name, "output_split_sizes")
    source_counts = checks.require_splits(input_split_sizes, source, call.size, call.public_name, "input_split_sizes")
    if output_split_sizes or input_split_sizes:
        checks.require_same_own_count(counts, source_counts, call.rank, call.public_name)
        call.counts = {"counts": counts, "source_counts": source_counts}
        call.signature_suffix, call.sizes_may_differ = "uneven", True
    else:
        checks.require_same_size(output, source, call.public_name, "output")
        call.signature_suffix = "even"
    return [([output], [source])]


# -- sparse tensors ----------------------------------------------------------------------------------------------------


def _sparse_all_reduce(call: _CallInProgress, tensor: torch.Tensor) -> Collective:
    """Sum sparse (COO) tensors in place: every rank gathers all entries and adds those with equal indices."""
    # 1. this rank's entries
    reduction, comm = call.reduction(tensor.dtype), call.dense.comm
    entries = tensor.detach().cpu().coalesce()
    places = entries.indices().t().contiguous()  # (entries, sparse dimensions)
    values = reduction.load(entries.values(), keep=True)

    def gathered(rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks in rank order, `lengths[r]` of rank r."""
        result = torch.empty(sum(lengths), *rows.shape[1:], dtype=rows.dtype, device="cpu")
        result.split(list(lengths))[call.rank].copy_(rows)
        mpi_calls.all_gather(comm, result, [length * math.prod(rows.shape[1:]) for length in lengths])
        return result

    def run() -> None:
        # 2. gather the entries of all ranks; coalesce() adds those with equal indices
        lengths = comm.allgather(len(places))
        indices, numbers = gathered(places, lengths).t(), gathered(values, lengths)
        total = torch.sparse_coo_tensor(indices, numbers, tensor.shape, check_invariants=False).coalesce()
        # 3. divide and round, then write the result to the caller's tensor
        sums = torch.empty_like(total.values(), dtype=tensor.dtype)
        reduction.store(total.values(), sums)
        with torch.no_grad():  # not detach(), which returns a sparse tensor with its own entries
            tensor.copy_(
                torch.sparse_coo_tensor(total.indices(), sums, tensor.shape, is_coalesced=True, check_invariants=False)
            )
        buffers.synchronize_stream(tensor)

    suffix = f"{reduction.name} sparse"
    return Collective(
        "all_reduce", [CollectiveStep(run, (), (), None)], [tensor], [tensor], [tensor], None, suffix, False
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def _as_is(tensors: Any) -> Any:
    return tensors


_AS_IS = (_as_is, _as_is)
_LIST, _LISTS = dispatcher.as_list, dispatcher.as_lists

TABLE: Sequence[CollectiveOperation] = (
    # -- reductions
    CollectiveOperation(
        "allreduce", "all_reduce", AllreduceOptions, _in_place_or_sparse, DenseCollectives.all_reduce,
        Side.TENSOR, Side.NONE, "All-reduce a tensor in place; sparse tensors (COO) support sums only.",
        reduces=True, operator_forms=(_LIST,),
    ),
    CollectiveOperation(
        "allreduce_coalesced", "all_reduce", AllreduceCoalescedOptions, _all_in_place, DenseCollectives.all_reduce,
        Side.TENSOR, Side.NONE, "All-reduce several tensors in place.",
        public_name="all_reduce_coalesced", reduces=True, operator_forms=(_as_is,),
    ),
    CollectiveOperation(
        "reduce", "reduce", ReduceOptions, _in_place, DenseCollectives.reduce,
        Side.TENSOR, Side.NONE, "Reduce a tensor in place on the root; those of other ranks keep their content.",
        root="dst", reduces=True, operator_forms=(_LIST,),
    ),
    CollectiveOperation(
        "reduce_scatter", "reduce_scatter", ReduceScatterOptions, _list_of_inputs, DenseCollectives.reduce_scatter_list,
        Side.TENSOR, Side.LIST, "Reduce a list with one tensor for each rank; sizes may differ between ranks.",
        list_parameter="input_list", reduces=True, operator_forms=(_LIST, _LISTS),
    ),
    CollectiveOperation(
        "reduce_scatter_single", "reduce_scatter", ReduceScatterOptions, _blocks, DenseCollectives.reduce_scatter,
        Side.TENSOR, Side.BLOCKS, "Reduce a tensor of group size times the output; each rank receives its block.",
        public_name="reduce_scatter_tensor", reduces=True, operator_forms=_AS_IS,
    ),
    CollectiveOperation(
        "reduce_scatter_single_coalesced", "reduce_scatter", ReduceScatterOptions, _all_blocks,
        DenseCollectives.reduce_scatter, Side.TENSOR, Side.BLOCKS,
        "Reduce several tensors, each of group size times its output; each rank receives its blocks.",
        public_name="reduce_scatter_tensor_coalesced", reduces=True, operator_forms=_AS_IS,
    ),
    # -- data movement
    CollectiveOperation(
        "broadcast", "broadcast", BroadcastOptions, _in_place, DenseCollectives.broadcast,
        Side.TENSOR, Side.NONE, "Copy the root's tensor to all ranks.",
        root="src", operator_forms=(_LIST,),
    ),
    CollectiveOperation(
        "allgather", "all_gather", AllgatherOptions, _list_of_outputs, DenseCollectives.all_gather_list,
        Side.LIST, Side.TENSOR, "Gather every rank's tensor into a list on every rank; sizes may differ between ranks.",
        list_parameter="tensor_list", compares_outputs=True, operator_forms=(_LISTS, _LIST),
    ),
    CollectiveOperation(
        "allgather_coalesced", "all_gather", AllgatherOptions, _several_lists_of_outputs,
        DenseCollectives.all_gather_list, Side.LIST, Side.TENSOR,
        "Gather several tensors of every rank: `outputs[r]` receives those of rank r.",
        public_name="all_gather_coalesced", compares_outputs=True, operator_forms=_AS_IS,
    ),
    CollectiveOperation(
        "all_gather_single", "all_gather", AllgatherOptions, _blocks, DenseCollectives.all_gather,
        Side.BLOCKS, Side.TENSOR, "Gather every rank's tensor into one tensor on every rank.",
        public_name="all_gather_into_tensor", operator_forms=_AS_IS,
    ),
    CollectiveOperation(
        "all_gather_single_coalesced", "all_gather", AllgatherOptions, _all_blocks, DenseCollectives.all_gather,
        Side.BLOCKS, Side.TENSOR, "Gather several tensors of every rank, each into its own output, on every rank.",
        public_name="all_gather_into_tensor_coalesced", operator_forms=_AS_IS,
    ),
    CollectiveOperation(
        "gather", "gather", GatherOptions, _list_of_outputs, DenseCollectives.gather,
        Side.LIST, Side.TENSOR, "Gather every rank's tensor into a list on the root; sizes may differ between ranks.",
        root="dst", list_parameter="gather_list", sizes_may_differ=True, operator_forms=(_LISTS, _LIST),
    ),
    CollectiveOperation(
        "gather_single", "gather", GatherOptions, _blocks_of_root, DenseCollectives.gather_single,
        Side.BLOCKS, Side.TENSOR, "Gather every rank's tensor into one on the root; other ranks' outputs are ignored.",
        public_name="gather_into_tensor", root="dst",
    ),
    CollectiveOperation(
        "scatter", "scatter", ScatterOptions, _list_of_inputs, DenseCollectives.scatter,
        Side.TENSOR, Side.LIST, "Send one tensor of the root's list to each rank; sizes may differ between ranks.",
        root="src", list_parameter="scatter_list", sizes_may_differ=True, compares_outputs=True,
        operator_forms=(_LIST, _LISTS),
    ),
    CollectiveOperation(
        "all_to_all_single", "all_to_all", AllToAllOptions, _rows, DenseCollectives.all_to_all,
        Side.BLOCKS, Side.BLOCKS,
        "Exchange rows of tensors; either all ranks omit both lists of split sizes, or each rank passes at least one.",
        public_name="all_to_all_single", operator_forms=_AS_IS,
    ),
    CollectiveOperation(
        "alltoall", "all_to_all", AllToAllOptions, _two_lists, DenseCollectives.all_to_all_list,
        Side.LIST, Side.LIST, "Send each rank its tensor of a list and receive one from each; sizes may differ.",
        sizes_may_differ=True, operator_forms=_AS_IS,
    ),
)  # fmt: skip
