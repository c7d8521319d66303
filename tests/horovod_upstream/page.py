"""Generates docs/horovod-tests.md from the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.conformance import page
from tests.conformance.verdicts import FAIL, PASS, SKIP
from tests.horovod_upstream import results
from tests.launching import ROOT

PATH = ROOT / "docs" / "horovod-tests.md"

_NO_GPU = "needs a GPU"
_NOT_FOR_MPI = "does not apply to MPI"
_REASONS = {
    "No GPUs available": _NO_GPU,
    "Gloo is not available": _NOT_FOR_MPI,
}
_INTRODUCTION = """\
# Horovod's own tests

`python -m tests.horovod_upstream` runs Horovod's `test/parallel/test_torch.py`, unmodified, on
[mpicomm.horovod](horovod.md) under `mpirun`: `import horovod.torch` is resolved as in `mpicomm run --horovod`. A test
passes if it passes on every rank. GPUs are hidden.

The tests create every optimizer of torch with parameters of all shapes. `torch.optim.Muon`, which is newer than
Horovod, accepts only matrices, so it is hidden from the tests. `test_timeline_api`, which Horovod skips because of a
defect of its own, is run.
"""


def write() -> None:
    PATH.write_text(text(results.read_all()))


def text(found: Mapping[str, dict[str, Any]]) -> str:
    columns = [(name, size, run) for name, each in found.items() for size, run in each["runs"].items()]
    names = list(dict.fromkeys(name for _, _, run in columns for name in run.verdicts))
    head = ["test", *(f"{name}, {size} ranks" for name, size, _ in columns), "reason"]
    rows = [
        [f"`{name}`", *(page.shown(run.verdicts.get(name)) for *_, run in columns), _reason(columns, name)]
        for name in names
    ]
    counts = [
        [f"{name}, {size} ranks", *(str(run.count(outcome)) for outcome in (PASS, FAIL, SKIP)), f"{run.seconds:.0f}"]
        for name, size, run in columns
    ]
    return "\n".join(
        [
            _INTRODUCTION,
            *(_described(each) for each in found.values()),
            "## Summary\n",
            page.table(["", "pass", "fail", "skip", "seconds"], counts),
            "## Every test\n",
            page.table(head, rows),
        ]
    )


def _described(each: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
    commit = each["source"]["commit"]
    of = f"commit {commit[:10]} of Horovod" if commit else f"a file with SHA-256 {each['source']['sha256'][:16]}"
    return f"- {each['date']}, {of}, one machine with {each['cores']} cores, no GPU: {versions}.\n"


def _reason(columns: list[tuple[str, int, results.Run]], name: str) -> str:
    found = [run.verdicts[name] for *_, run in columns if name in run.verdicts]
    reasons = dict.fromkeys(explained(each.reason, name) for each in found if each.reason)
    return page.escaped("; ".join(reasons))


def explained(reason: str, name: str) -> str:
    """Return why a test was skipped."""
    if name == "test_broadcast_state_gpu":  # disabled by Horovod without a reason
        return _NO_GPU
    return _REASONS.get(reason, reason)
