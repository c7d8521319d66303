"""The exchange of halos: the cells around a rank's part of a grid, which are copies of its neighbours' cells.

The dimensions are exchanged one after the other, and each message covers the halos of the dimensions before it, so that
also the corners arrive, without messages between diagonal neighbours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist

from mpicomm import agreement, arguments
from mpicomm.arguments import FLAG
from mpicomm.collective_ops import autograd, call_check, handles, messages, packing, pytree
from mpicomm.collective_ops.group_argument import GroupArgument, resolve
from mpicomm.collective_ops.handles import IN_THE_CALL, Handle, Mode, Steps, Works
from mpicomm.collective_ops.pytree import NUMBER, SCALAR, Data
from mpicomm.errors import MismatchError, raised_on_all_ranks

T = TypeVar("T")

_MOST_DIMENSIONS = 3
_GRID = arguments.instance("a tuple or list of integers", tuple, list, remedy="Pass the number of ranks per dimension.")
_PERIODIC = arguments.instance("True, False, or a tuple or list of them", bool, tuple, list)


class _Slabs(NamedTuple):
    """Where the slabs of cells at both sides of a dimension start; counted from the end if negative."""

    low: int
    high: int


class HaloExchange:
    """Fills the halos of a grid's parts with the neighbours' cells, for stencils and convolutions across ranks.

    The ranks form a grid of 1 to 3 dimensions; the last one varies fastest with the rank. In each of these, the last
    dimensions of a tensor, its first and last `width` cells are the halo. A part without halos must have at least
    `width` cells per dimension; the parts of a dimension may have different lengths.

        exchange = mpicomm.HaloExchange(grid=(2, 2), width=1, periodic=True)
        height = exchange(height)

    Attributes:
        coordinates: This rank's place in the grid.
        neighbors: For each dimension, the lower and the higher neighbour's rank in the group; None at a border.
    """

    def __init__(
        self, grid: Sequence[int], width: int = 1, *, periodic: bool | Sequence[bool] = False, group: Any = None
    ) -> None:
        """Place the ranks in the grid (collective).

        Args:
            grid: The number of ranks in each dimension; their product is the size of the group.
            width: The number of cells on each side that belong to the halo.
            periodic: Whether the last part of a dimension is a neighbour of the first one; for all dimensions or each.
            group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.

        Raises:
            TypeError: If an argument is of another type.
            ValueError: If the grid has no or more than 3 dimensions, or another number of ranks than the group.
            MismatchError: On every rank, if the ranks pass valid arguments that differ.
        """
        self._members = resolve(group, "HaloExchange")
        self.grid = _checked_grid(grid, self._members)
        arguments.POSITIVE.check(width, "width", "HaloExchange")
        self.width = int(width)
        self.periodic = _checked_periodic(periodic, len(self.grid))
        self.coordinates = _coordinates(self._members.rank, self.grid)
        self.neighbors = tuple(self._neighbors(dimension) for dimension in range(len(self.grid)))
        operation = f"HaloExchange grid={self.grid} width={self.width} periodic={self.periodic}"
        nothing = pytree.take(None, "HaloExchange").description
        handles.run(call_check.compare_signatures(self._members, (operation, nothing), IN_THE_CALL))
        self._edges = _Slabs(low=self.width, high=-2 * self.width)
        self._halos = _Slabs(low=0, high=-self.width)
        self._fitting: list[list[int]] = []  # the lengths of the last parts that have been checked

    def __deepcopy__(self, memo: dict[int, Any]) -> HaloExchange:
        """Return this object, which its calls do not change: a copy of a model uses the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a HaloExchange cannot be pickled: it belongs to a group of this process.\n"
            "Save its arguments, and create it again where the ranks are started."
        )

    def __repr__(self) -> str:
        return (
            f"HaloExchange(grid={self.grid}, width={self.width}, periodic={self.periodic}, "
            f"coordinates={self.coordinates})"
        )

    @overload
    def __call__(self, data: T, *, inplace: bool = ..., async_op: Literal[False] = ...) -> T: ...
    @overload
    def __call__(self, data: T, *, inplace: bool = ..., async_op: Literal[True]) -> Handle[T]: ...
    def __call__(self, data: Any, *, inplace: bool = False, async_op: bool = False) -> Any:
        """Return data whose halos have the neighbours' cells (collective).

        Outside of the grid, beyond a border that is not periodic, cells keep their values, which the neighbours along
        the border exchange, too. Leaves of the same dtype and device share one message per neighbour. Differentiable:
        the gradient of a halo is added to that of the cells that it copies.

        Args:
            data: A tensor, an array, or a container of them, of any number of dimensions before those of the grid.
            inplace: Write into the tensors and arrays of `data`, and return them.
            async_op: Return a `Handle` at once; its `wait()` returns the result. Do not change the data before.

        Raises:
            ValueError: If a leaf has fewer dimensions than the grid or too few cells, or `inplace` is set and a leaf
                cannot be written.
            TypeError: If `data` holds a leaf of an unsupported type.
            MismatchError: On every rank, if the ranks' data differ in structure, dtype, device type, or the dimensions
                before those of the grid, or neighbours' parts do not fit together.
        """
        FLAG.check(inplace, "inplace", "HaloExchange")
        own_data = pytree.or_error(partial(self._take, data, inplace))
        tensors = own_data.tensors if isinstance(own_data, Data) else None
        steps = partial(self._exchange, own_data, inplace)
        return handles.start(steps, "HaloExchange", self._members, async_op, tensors)

    # -- arguments ---------------------------------------------------------------------------------------------------

    def _neighbors(self, dimension: int) -> tuple[int | None, int | None]:
        def neighbor(step: int) -> int | None:
            place = self.coordinates[dimension] + step
            if not (0 <= place < self.grid[dimension] or self.periodic[dimension]):
                return None
            places = list(self.coordinates)
            places[dimension] = place % self.grid[dimension]
            return _rank_at(places, self.grid)

        return neighbor(-1), neighbor(1)

    def _take(self, data: Any, inplace: bool) -> Data:
        taken = pytree.take(data, "HaloExchange", is_output=inplace)
        dimensions, least = len(self.grid), 3 * self.width
        for kind, tensor, path in zip(
            taken.description.kinds, taken.tensors, pytree.paths(taken.description.structure), strict=True
        ):
            if kind in (NUMBER, SCALAR) or tensor.dim() < dimensions or min(tensor.shape[-dimensions:]) < least:
                raise ValueError(
                    f"HaloExchange: expected tensors of at least {dimensions} dimensions, the last with at least "
                    f"{least} cells (a halo of {self.width} on both sides, and as many cells between), got "
                    f"{list(tensor.shape)} for {path}.\nPass larger parts, or use fewer ranks."
                )
        return taken

    # -- the comparison ----------------------------------------------------------------------------------------------

    def _compare(self, data: Data | Exception, operation: str, mode: Mode) -> Generator[Works, None, None]:
        """Compare the calls of all ranks, and the lengths of their parts.

        Raises:
            MismatchError: On every rank, if they do not fit together.
        """
        operation, description = call_check.signature_of(operation, data)
        dimensions = len(self.grid)
        shapes = [(*shape[:-dimensions], *["*"] * dimensions) for shape in description.shapes]
        signature = operation, description._replace(shapes=tuple(shapes))
        lengths = _digests_of_lengths(description.shapes, dimensions)
        rows = yield from call_check.compare_and_gather(self._members, signature, lengths, mode)
        if rows != self._fitting:
            self._check_fit(rows, description.shapes)
            self._fitting = rows

    def _check_fit(self, rows: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]) -> None:
        """Check that ranks at the same place of a dimension have parts of the same length in it (collective)."""
        lengths: dict[tuple[int, int], int] = {}
        for rank, row in enumerate(rows):
            for place, length in zip(enumerate(_coordinates(rank, self.grid)), row, strict=True):
                if lengths.setdefault(place, length) != length:
                    self._refuse(place[0], shapes)

    def _refuse(self, dimension: int, shapes: Sequence[Sequence[int]]) -> None:
        """Raise the error of parts that do not fit together (collective).

        Raises:
            MismatchError: Always, on every rank of the group.
        """
        shown: list[Any] = [None] * self._members.size
        dist.all_gather_object(shown, ", ".join(str(list(shape)) for shape in shapes), group=self._members.handle)
        raise raised_on_all_ranks(
            MismatchError(
                f"HaloExchange: ranks at the same place of dimension {dimension} of the grid {self.grid} must have "
                f"equally many cells in it, got\n{call_check.table_of(self._members, shown)}\n"
                f"Cut the grid into parts along straight lines."
            )
        )

    # -- the exchange ------------------------------------------------------------------------------------------------

    def _exchange(self, data: Data | Exception, inplace: bool, mode: Mode) -> Steps:
        tag = messages.halo_tag(self._members)  # in the call: later steps of two calls may run in another order
        with call_check.raise_after_comparison(data):
            yield from self._compare(data, "HaloExchange in place" if inplace else "HaloExchange", mode)
        assert isinstance(data, Data)
        if inplace:
            yield from self._fill([tensor.detach() for tensor in data.tensors], data, tag, mode)
            return data.description.rebuilt(data.tensors)
        return data.description.rebuilt((yield from self._differentiable(data, tag, mode, is_transposed=False)))

    def _differentiable(self, data: Data, tag: int, mode: Mode, *, is_transposed: bool) -> Steps:
        """Return copies of the tensors after the exchange or the transposed one, the gradient of which is the other."""
        fields = [tensor.detach().clone() for tensor in data.tensors]
        yield from (self._collect if is_transposed else self._fill)(fields, data, tag, mode)
        with_gradient = [index for index, has_gradient in enumerate(data.description.gradients) if has_gradient]

        def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
            taken = pytree.take([grads[index] for index in with_gradient], "HaloExchange, backward")
            own_tag = messages.halo_tag(self._members)
            steps = self._differentiable(taken, own_tag, IN_THE_CALL, is_transposed=not is_transposed)
            for index, gradient in zip(with_gradient, handles.run(steps), strict=True):
                grads[index] = gradient
            return grads

        return autograd.attach(fields, data.tensors, backward, is_needed=data.description.has_gradient)

    def _fill(self, fields: Sequence[torch.Tensor], data: Data, tag: int, mode: Mode) -> Steps:
        """Write the neighbours' cells into the halos."""
        for dimension in range(len(self.grid)):
            received = yield from self._shift(fields, data, dimension, self._edges, tag, mode)
            for at, cells in zip((self._halos.high, self._halos.low), received, strict=True):
                for field, arrived in zip(fields, cells, strict=bool(cells)):
                    with torch.inference_mode(field.is_inference()):  # other code may not write into such a tensor
                        self._slab(field, dimension, at).copy_(arrived)

    def _collect(self, fields: Sequence[torch.Tensor], data: Data, tag: int, mode: Mode) -> Steps:
        """Add the halos to the neighbours' cells that they copy, and make them zero: the transpose of `_fill`."""
        for dimension in range(len(self.grid)):
            received = yield from self._shift(fields, data, dimension, self._halos, tag, mode)
            for at, cells in zip((self._edges.high, self._edges.low), received, strict=True):
                for field, arrived in zip(fields, cells, strict=bool(cells)):
                    self._slab(field, dimension, at).add_(arrived)
            for neighbor, at in zip(self.neighbors[dimension], self._halos, strict=True):
                for field in fields if neighbor is not None else []:
                    self._slab(field, dimension, at).zero_()

    def _shift(
        self, tensors: Sequence[torch.Tensor], data: Data, dimension: int, slabs: _Slabs, tag: int, mode: Mode
    ) -> Generator[Works, None, list[list[torch.Tensor]]]:
        """Send the low slabs of tensors to the lower neighbour, and the high ones to the higher neighbour.

        Returns:
            What the higher neighbour has sent, one slab for each tensor, and what the lower one has; empty if there is
            no neighbour.
        """
        lower, higher = self.neighbors[dimension]
        if lower is None and higher is None:
            return [[], []]
        batch: list[dist.P2POp] = []
        arrived = []
        for target, source, at in ((lower, higher, slabs.low), (higher, lower, slabs.high)):
            own = [self._slab(tensor, dimension, at) for tensor in tensors]
            arrived.append(self._pass_on(own, data, target, source, tag, batch))
        works = dist.batch_isend_irecv(batch) if batch else []
        if mode.early or dimension == len(self.grid) - 1:
            yield works
        else:  # the messages of the next dimension must not depend on when this rank waits for its handle
            handles.wait_for_all(works)
        return arrived

    def _pass_on(
        self,
        own: Sequence[torch.Tensor],
        data: Data,
        target: int | None,
        source: int | None,
        tag: int,
        batch: list[dist.P2POp],
    ) -> list[torch.Tensor]:
        """Add the messages with slabs to and from two neighbours, which may be this rank itself or missing.

        Returns:
            The slabs that `source` sends; empty if it is missing.
        """
        arriving: list[torch.Tensor] = [torch.empty(0)] * len(own) if source is not None else []
        for indices in packing.by_dtype(data):
            sent = packing.packed([own[index] for index in indices])
            received = sent if source == self._members.rank else torch.empty_like(sent)
            if target not in (None, self._members.rank):
                batch.append(self._message(dist.isend, sent, target, tag))
            if source not in (None, self._members.rank):
                batch.append(self._message(dist.irecv, received, source, tag))
            if source is not None:
                parts = packing.unpacked(received, [own[index].shape for index in indices])
                for index, part in zip(indices, parts, strict=True):
                    arriving[index] = part
        return arriving

    def _message(self, kind: Any, tensor: torch.Tensor, rank: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._members.ranks[rank], self._members.handle, tag)

    def _slab(self, tensor: torch.Tensor, dimension: int, at: int) -> torch.Tensor:
        """Return the cells of a slab, which starts at a place in a dimension of the grid."""
        axis = dimension - len(self.grid)
        return tensor.narrow(axis, at if at >= 0 else tensor.shape[axis] + at, self.width)


# -- the grid ----------------------------------------------------------------------------------------------------------


def _checked_grid(grid: Any, members: GroupArgument) -> tuple[int, ...]:
    _GRID.check(grid, "grid", "HaloExchange")
    for ranks in grid:
        arguments.POSITIVE.check(ranks, "grid", "HaloExchange")
    if not 1 <= len(grid) <= _MOST_DIMENSIONS or math.prod(grid) != members.size:
        raise ValueError(
            f"HaloExchange: grid must have 1 to {_MOST_DIMENSIONS} dimensions and as many ranks as the group, "
            f"{members.size}, got {tuple(grid)}.\n{_GRID.remedy}"
        )
    return tuple(int(ranks) for ranks in grid)


def _checked_periodic(periodic: Any, dimensions: int) -> tuple[bool, ...]:
    _PERIODIC.check(periodic, "periodic", "HaloExchange")
    each = (periodic,) * dimensions if isinstance(periodic, bool) else tuple(periodic)
    for value in each:
        FLAG.check(value, "periodic", "HaloExchange")
    if len(each) != dimensions:
        raise ValueError(
            f"HaloExchange: periodic must be True, False, or {dimensions} of them, got {periodic}.\n"
            f"Pass one for each dimension of the grid."
        )
    return each


def _coordinates(rank: int, grid: Sequence[int]) -> tuple[int, ...]:
    """Return the place of a rank in a grid, whose last dimension varies fastest."""
    places = []
    for ranks in reversed(grid):
        rank, place = divmod(rank, ranks)
        places.append(place)
    return tuple(reversed(places))


def _rank_at(places: Sequence[int], grid: Sequence[int]) -> int:
    rank = 0
    for place, ranks in zip(places, grid, strict=True):
        rank = rank * ranks + place
    return rank


@functools.lru_cache(maxsize=256)
def _digests_of_lengths(shapes: tuple[Sequence[int], ...], dimensions: int) -> list[int]:
    """Return, for each dimension of the grid, a digest of the lengths of all leaves in it."""
    of_dimensions = [[shape[axis] for shape in shapes] for axis in range(-dimensions, 0)]
    return [agreement.digest(repr(lengths).encode())[0] for lengths in of_dimensions]
