"""Greedy decoding with a random Llama-like model whose layers are split over the ranks (tensor parallelism).

The projections into a layer are split by columns and those out of it by rows, so that each layer needs one all_reduce
after attention and one after the MLP. Embeddings and head are whole on every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from mpicomm.bench import timing
from mpicomm.bench.compared_backends import NOTHING
from mpicomm.bench.timing import Bench
from mpicomm.errors import LaunchError
from mpicomm.job.session import World

ALONE = "one process"
"""The name of the row of a single process, with the whole model."""
PROMPT, TOKENS = 16, 32
"""Tokens that are read at once, and tokens that are generated one by one."""

Reducer = Callable[[torch.Tensor], object]
"""Replaces a tensor by the sum of the tensors of all ranks."""

_SEED = 1
_ROTARY_BASE = 10_000.0
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values; a multiple of the number of ranks."""
    hidden: int
    vocabulary: int = 1024

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


SHAPES = {"small": Shape(384, 4, 24, 12, 1152), "middle": Shape(768, 4, 24, 12, 2304)}


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """Results for one model and backend; times are those of the slowest rank."""

    model: str
    parameters: int
    backend: str
    tokens_per_s: float
    tokens_per_s_median: float
    us_per_token: float
    all_reduces: int
    """All-reduces per token."""
    nbytes: int
    """Size of each."""
    wrong: int | None
    """Tokens on all ranks that differ from those of one process; None without communication."""


def measure(
    model: str, reducers: Mapping[str, Reducer], world: World, bench: Bench, device: torch.device
) -> list[DecodeRow]:
    """Measure decoding with each backend, and on one process (collective).

    Args:
        model: A name in `SHAPES`.
        reducers: The all-reduces of the backends, by name.
        world: The ranks.
        bench: The functions for timing.
        device: The device of the model.

    Raises:
        LaunchError: If the model cannot be split over this number of ranks.
    """
    shape = SHAPES[model]
    if shape.kv_heads % world.size:
        raise LaunchError(
            f"the number of ranks must divide the {shape.kv_heads} heads of the model, got {world.size} ranks.\n"
            f"Start 1, 2, 3, 4, 6 or 12 ranks."
        )
    layers = make_layers(shape, world.rank, world.size, device)
    decoders = {name: Decoder(shape, layers, reducer) for name, reducer in reducers.items()}
    alone = Decoder(shape, make_layers(shape, 0, 1, device), lambda _: None) if world.rank == 0 else None
    calls = {ALONE: alone.generate if alone else list}
    calls |= {name: decoder.generate for name, decoder in decoders.items()}
    tokens = {name: call() for name, call in calls.items()}
    times = timing.in_turn(bench, calls)
    gathered: list[dict[str, list[int]]] = bench.gather(tokens)  # type: ignore[assignment]
    return [_row(model, name, times[name], gathered) for name in calls]


def _row(model: str, name: str, times: timing.Times, tokens: Sequence[Mapping[str, Sequence[int]]]) -> DecodeRow:
    shape = SHAPES[model]
    expected = tokens[0][ALONE]
    ranks = tokens[:1] if name == ALONE else tokens
    pairs = [pair for rank_tokens in ranks for pair in zip(rank_tokens[name], expected, strict=True)]
    differing = sum(token != right for token, right in pairs)
    is_split = name != ALONE
    return DecodeRow(
        model=model,
        parameters=number_of_parameters(shape),
        backend=name,
        tokens_per_s=round(1e6 * TOKENS / times.least, 1),
        tokens_per_s_median=round(1e6 * TOKENS / times.median, 1),
        us_per_token=round(times.least / TOKENS, 1),
        all_reduces=2 * shape.layers * is_split,
        nbytes=4 * shape.width * is_split,
        wrong=None if name == NOTHING else differing,
    )


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of a layer on one rank, as `torch.nn.functional.linear` takes them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Layers:
    """The weights of a rank."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: Sequence[Layer]


def number_of_parameters(shape: Shape) -> int:
    """Return the number of parameters of the whole model."""
    sizes = [math.prod(size) for size, _ in _sizes(shape).values()]
    return shape.layers * sum(sizes) + 2 * shape.vocabulary * shape.width


def make_layers(shape: Shape, rank: int, size: int, device: torch.device) -> Layers:
    """Return this rank's part of the weights; those of the whole model are the same for every number of ranks."""
    generator = torch.Generator().manual_seed(_SEED)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def part(rows: int, columns: int, axis: int) -> torch.Tensor:
        return weight(rows, columns).chunk(size, axis)[rank].contiguous().to(device)

    embedding, head = weight(shape.vocabulary, shape.width), weight(shape.vocabulary, shape.width)
    layers = [
        Layer(**{name: part(*whole, axis) for name, (whole, axis) in _sizes(shape).items()})
        for _ in range(shape.layers)
    ]
    return Layers(embedding.mul_(math.sqrt(shape.width)).to(device), head.to(device), layers)


def _sizes(shape: Shape) -> dict[str, tuple[tuple[int, int], int]]:
    """Return the size of each weight of a layer, and the axis along which it is split."""
    width, hidden, kv_width = shape.width, shape.hidden, shape.kv_heads * shape.head_width
    into, out = 0, 1
    return {
        "query": ((width, width), into),
        "key": ((kv_width, width), into),
        "value": ((kv_width, width), into),
        "output": ((width, width), out),
        "gate": ((hidden, width), into),
        "up": ((hidden, width), into),
        "down": ((width, hidden), out),
    }


class Decoder:
    """Generates tokens, with caches of keys and values."""

    def __init__(self, shape: Shape, weights: Layers, reducer: Reducer) -> None:
        """Allocate the caches.

        Args:
            shape: The sizes of the whole model.
            weights: This rank's weights.
            reducer: Replaces a tensor by its sum over the ranks.
        """
        self._shape, self._weights, self._reduce = shape, weights, reducer
        self._device = weights.embedding.device
        kv_heads = weights.layers[0].key.shape[0] // shape.head_width
        size = (len(weights.layers), kv_heads, PROMPT + TOKENS, shape.head_width)
        self._keys, self._values = (torch.zeros(size, device=self._device) for _ in range(2))
        frequencies = _ROTARY_BASE ** -(torch.arange(0, shape.head_width, 2) / shape.head_width)
        angles = torch.outer(torch.arange(PROMPT + TOKENS), frequencies).repeat(1, 2).to(self._device)
        self._cos, self._sin = angles.cos(), angles.sin()

    @torch.inference_mode()
    def generate(self) -> list[int]:
        """Read the prompt, and return the most probable next token `TOKENS` times (collective)."""
        prompt = torch.arange(PROMPT, device=self._device)
        tokens = [self._next(prompt, 0)]
        for position in range(PROMPT, PROMPT + TOKENS - 1):
            tokens.append(self._next(tokens[-1], position))
        return [int(token) for token in tokens]

    def _next(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Return the token after these, the first of which is at this position."""
        x = self._weights.embedding[tokens.reshape(-1)]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._reduced(self._attention(index, layer, _normalized(x), position))
            x = x + self._reduced(self._mlp(layer, _normalized(x)))
        return functional.linear(_normalized(x[-1]), self._weights.head).argmax()

    def _attention(self, index: int, layer: Layer, x: torch.Tensor, position: int) -> torch.Tensor:
        here = slice(position, position + len(x))
        query, key, value = (
            functional.linear(x, weight).unflatten(-1, (-1, self._shape.head_width)).transpose(0, 1)
            for weight in (layer.query, layer.key, layer.value)
        )
        self._keys[index, :, here] = self._rotated(key, here)
        self._values[index, :, here] = value
        keys, values = (cache[index, :, : here.stop] for cache in (self._keys, self._values))
        attended = functional.scaled_dot_product_attention(
            self._rotated(query, here), keys, values, is_causal=len(x) > 1, enable_gqa=True
        )
        return functional.linear(attended.transpose(0, 1).flatten(1), layer.output)

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        self._reduce(x)
        return x

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            functional.silu(functional.linear(x, layer.gate)) * functional.linear(x, layer.up), layer.down
        )

    def _rotated(self, heads: torch.Tensor, here: slice) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        return heads * self._cos[here] + torch.cat((-second, first), -1) * self._sin[here]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=_EPSILON)
