"""Compression of tensors before a reduction."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The interface of a compression; its methods are called on the class."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, and the argument `ctx` of `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004  the interface
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16 if it is a floating-point tensor, and its dtype."""
        return tensor.half() if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """The available compressions: pass `Compression.none` or `Compression.fp16` as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
