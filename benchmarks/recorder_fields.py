"""The time that the fields for `torchfrtrace` and `mpicomm timeline` add to the record of an operation.

`mpirun -n 1 python -m benchmarks.recorder_fields` measures it, and writes docs/results/recorder-fields-1-<MPI>.json.

These fields are the tag and the number of a message. The recorder is compared with itself without them, in turn within
one run; the figures are the fastest rounds.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

import mpicomm
from benchmarks import rank_results
from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Group

ROUNDS = 400
CALLS = 500  # in a round
_FIELDS = "operation.end = operation.tag = operation.message = None"


def main() -> None:
    """Measure, and write the results."""
    world = mpicomm.bootstrap("mpi")
    group = Group("benchmark", range(world.size), 1800.0, is_world=False)
    with_fields, without = flight_recorder.note, _without_fields()
    cases: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "collective": (_collective(group, without), _collective(group, with_fields)),
        "message": (_message(group, without, is_numbered=False), _message(group, with_fields, is_numbered=True)),
    }
    figures = {}
    for name, calls in cases.items():
        before, after = _fastest(calls)
        figures[name] = {"without": round(before, 3), "with": round(after, 3), "added": round(after - before, 3)}
    what = "the record of an operation, without and with tag and number of a message; fastest of interleaved rounds"
    rank_results.write(f"recorder-fields-{world.size}", world.size, what, microseconds=figures)


def _without_fields() -> Callable[..., Any]:
    """Return `flight_recorder.note` without the statement that sets the fields."""
    source = inspect.getsource(flight_recorder.note)
    assert source.count(_FIELDS) == 1
    namespace: dict[str, Any] = {}
    code = compile(source.replace(_FIELDS, "operation.end = None"), flight_recorder.__file__, "exec", dont_inherit=True)
    module = vars(flight_recorder)
    exec(code, module, namespace)
    return namespace["note"]


def _collective(group: Group, note: Callable[..., Any]) -> Callable[[], None]:
    def call() -> None:
        note(group, "all_reduce", torch.float32, 1, None, False, True, 0).finish()

    return call


def _message(group: Group, note: Callable[..., Any], *, is_numbered: bool) -> Callable[[], None]:
    def call() -> None:
        operation = note(group, "send", torch.float32, 1, 0, True, False, 0)
        if is_numbered:
            operation.number_message(0)
        operation.finish()

    return call


def _fastest(calls: tuple[Callable[[], None], ...]) -> list[float]:
    """Return the microseconds of each call in its fastest round."""
    fastest = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            fastest[number] = min(fastest[number], (time.perf_counter() - start) / CALLS * 1e6)
    return fastest


if __name__ == "__main__":
    main()
