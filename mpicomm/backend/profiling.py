"""The spans of a group's operations in torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicomm.backend import torch_internals
from mpicomm.backend.buffers import Tensors


class Profiler:
    """Starts spans under the name of the group's backend, while a profiler is active."""

    def __init__(self) -> None:
        self.backend_name = "mpicomm"

    def start(self, name: str, inputs: Tensors) -> Any:
        """Start a span; return the event that ends it."""
        return torch_internals.start_event(f"{self.backend_name}:{name}", inputs)

    def spanned(self, call: Callable[[], None], name: str, inputs: Tensors) -> Callable[[], None]:
        """Start a span; return a call that runs `call` and ends the span."""
        span = self.start(name, inputs)

        def ending() -> None:
            try:
                call()
            finally:
                torch_internals.end_event(span)

        return ending
