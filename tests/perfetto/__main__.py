"""`python -m tests.perfetto figure` runs a job, and draws docs/results/timeline-4-openmpi.png by SQL on its trace.

Perfetto's trace processor reads the trace that `mpicomm timeline` wrote.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from mpicomm.cli.main import main as mpicomm
from mpicomm.reports import plots
from tests.launching import ROOT, run_ranks
from tests.perfetto import processor

FIGURE = ROOT / "docs" / "results" / "timeline-4-openmpi.png"
SIZE = 4

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap()
rank, size = world.rank, world.size
gradients, activations = torch.ones(1 << 20), torch.ones(1 << 18)
for step in range(8):
    dist.barrier()
    if rank == 1 and step == 6:
        time.sleep(0.3)
    time.sleep(0.05)
    if rank > 0:
        dist.recv(activations, rank - 1)
        time.sleep(0.02)
    if rank < size - 1:
        dist.send(activations, rank + 1)
    dist.all_reduce(gradients)
mpicomm.dump_flight_recorder(sys.argv[1])
"""

_LAST = 3  # barriers from the end at which the figure begins
_SLICES = """
SELECT process.pid AS rank, slice.name AS name, slice.ts AS ts, slice.dur AS dur, slice.category AS category
FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
WHERE slice.dur > 0 ORDER BY slice.depth, slice.ts
"""
_ARROWS = """
SELECT a.pid AS source, sender.ts AS ts, b.pid AS target, receiver.ts + receiver.dur AS received
FROM flow JOIN slice sender ON slice_out = sender.id JOIN slice receiver ON slice_in = receiver.id
JOIN thread_track s ON sender.track_id = s.id JOIN thread t ON s.utid = t.utid JOIN process a ON t.upid = a.upid
JOIN thread_track r ON receiver.track_id = r.id JOIN thread u ON r.utid = u.utid JOIN process b ON u.upid = b.upid
"""
_COLOURS = {"all_reduce": "#4477aa", "barrier": "#66ccee", "send": "#228833", "recv": "#ccbb44", "wait": "#dddddd"}


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "program.py"
        program.write_text(PROGRAM)
        outcome = run_ranks(SIZE, [str(program), str(folder / "dumps")])
        assert outcome.status == 0, outcome
        if status := mpicomm(["timeline", str(folder / "dumps"), "-o", str(folder / "trace.json")]):
            return status
        with processor.opened(folder / "trace.json", folder) as opened:
            slices, arrows = processor.rows(opened, _SLICES), processor.rows(opened, _ARROWS)
    figure = plots.new_figure((9, 3))
    _draw(figure.subplots(), slices, arrows)
    plots.save(figure, FIGURE)
    return 0


def _draw(axes: Axes, slices: list[tuple[Any, ...]], arrows: list[tuple[Any, ...]]) -> None:
    starts = sorted(ts for rank, name, ts, _, _ in slices if rank == 0 and name == "barrier")
    first, last = starts[-_LAST], max(ts + dur for _, name, ts, dur, _ in slices if name == "all_reduce")
    shown = set()
    for rank, name, ts, dur, category in slices:
        kind = "wait" if category == "wait" else name
        if kind in _COLOURS and ts >= first and ts + dur <= last:
            label = None if kind in shown else "wait for a rank" if kind == "wait" else kind
            axes.barh(rank, dur / 1e6, left=(ts - first) / 1e6, height=0.7, color=_COLOURS[kind], label=label)
            shown.add(kind)
    for source, ts, target, received in arrows:
        if ts >= first:
            ends = ((received - first) / 1e6, target), ((ts - first) / 1e6, source)
            axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "lw": 0.8})
    axes.set_yticks(range(SIZE), [f"rank {rank}" for rank in range(SIZE)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(ncols=len(shown), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


if __name__ == "__main__":
    if sys.argv[1:] != ["figure"]:
        sys.exit("usage: python -m tests.perfetto figure")
    sys.exit(main())
