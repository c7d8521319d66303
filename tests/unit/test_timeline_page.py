"""The page of `mpicomm timeline --html`: its text, and what a browser draws of it."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpicomm.reports import job_summary, job_trace, timeline_page
from mpicomm.reports.job_trace import DumpedOperation, RankDump
from tests import time_limits

SIZE, STEPS, LATE = 4, 50, 1
"""Ranks; all_reduces of each rank; the rank that is late for each of them."""

STEP, DELAY = 0.010, 0.006  # seconds between the all_reduces, and by which rank LATE is late for them
HOST = "node</script><b>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome in PATH, which draws the page")


def operation(rank: int, name: str, called: float, end: float, **fields: Any) -> DumpedOperation:
    common = {"number": 0, "group": "0", "members": "", "sequence": None, "is_message": False, "dtype": "float32"}
    common |= {"count": 1024, "nbytes": 4096, "peer": None, "tag": None, "message": None, "is_over": True}
    start = None if fields.get("is_message") else called  # the program does not wait for the messages
    return DumpedOperation(rank, called, start, end, common | {"name": name, "where": "train.py:7 (<step>)"} | fields)


def dumps(size: int = SIZE, steps: int = STEPS) -> list[RankDump]:
    """Return the dumps of ranks that call an all_reduce in each step, after which each sends a message to the next."""
    ranks = []
    for rank in range(size):
        operations = []
        for step in range(steps):
            late, over = step * STEP + (DELAY if rank == LATE else 0), step * STEP + DELAY + 0.001
            operations.append(operation(rank, "all_reduce", late, over, sequence=step))
            right, left = (rank + 1) % size, (rank - 1) % size
            message = {"is_message": True, "tag": 3, "message": step}
            operations.append(operation(rank, "send", over + 0.0005, over + 0.001, peer=right, **message))
            operations.append(operation(rank, "recv", over + 0.0015, over + 0.002, peer=left, **message))
        ranks.append(RankDump(rank, size, HOST, "same clock", 0.0, operations))
    return ranks


def data_of(page: str) -> Any:
    (packed,) = re.findall(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]+)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_names_the_straggler_escapes_text_and_needs_no_network() -> None:
    page = timeline_page.page(dumps(), "Timeline of @DATA@ <i>")
    assert "<h1>Timeline of @DATA@ &lt;i&gt;</h1>" in page
    operations, messages = SIZE * STEPS * 3, SIZE * STEPS
    assert f"{SIZE} ranks on 1 host, {operations:,} operations and {messages} messages in" in page
    waits = (SIZE - 1) * STEPS
    waited = f"rank {LATE} on {html.escape(HOST)}: {waits * DELAY:.3f} s in total, in {waits} waits."
    assert re.findall("<p id=.straggler.>(.*)</p>", page) == [f"The other ranks waited longest for {waited}"]
    assert HOST not in page
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    lane = data_of(page)["ranks"][0]["lanes"][0]
    assert lane["called"] == [0] + [round(STEP * 1e9)] * (STEPS - 1)
    assert set(lane["waits"]["length"]) == {round(DELAY * 1e9)}


def test_operations_that_are_not_over_and_ranks_without_a_file() -> None:
    last = operation(0, "all_reduce", 1.0, 3.5, sequence=1, is_over=False)
    page = timeline_page.page([RankDump(0, 2, "a", "same clock", 0.0, [last])], "")
    assert "<p>1 of 2 ranks on 1 host, 1 operation and 0 messages in 2.500 s; 1 operation was not over</p>" in page
    assert "rank 1, which wrote no dump file: 2.500 s in total, in 1 wait." in page
    alone = operation(0, "all_reduce", 1.0, 1.5, sequence=1)
    assert "No rank waited for another rank." in timeline_page.page(
        [RankDump(0, 1, "a", "same clock", 0.0, [alone])], ""
    )
    assert data_of(timeline_page.page([], ""))["ranks"] == []


def test_a_collective_whose_call_a_ring_has_dropped_names_no_straggler() -> None:
    ranks = [[operation(rank, "all_reduce", step + late, step + 0.5, sequence=step) for step in range(9)]
             for rank, late in ((0, 0.0), (1, 0.2), (2, 0.1))]  # fmt: skip
    ranks[1] = ranks[1][-3:]
    waits = job_trace.waits([RankDump(rank, 3, "a", "same clock", 0.0, ops) for rank, ops in enumerate(ranks)])
    assert {(wait.operation.rank, *wait.ranks) for wait in waits} == {(0, 1), (2, 1)}
    assert {wait.operation.fields["sequence"] for wait in waits} == {6, 7, 8}


@pytest.mark.parametrize(
    ("clock", "error", "text"),
    [
        ("measured", 1e-4, None),
        ("measured", 0.5, "the mean wait of 6000 us is shorter than the error of the clocks, 500000 us."),
        ("wall clock", 0.0, "the times of rank 1 are those of the wall clock, whose error is unknown."),
    ],
)
def test_a_straggler_is_uncertain_if_the_clocks_are(clock: str, error: float, text: str | None) -> None:
    ranks = dumps()
    ranks[1].clock, ranks[1].error = clock, error
    line = job_summary.straggler_line(job_summary.of(ranks, job_trace.waits(ranks)))
    assert ("uncertain" in line) == (text is not None)
    assert line.endswith(text or "waits.")


FIELDS = operation(0, "all_reduce", 1.0, 2.0, sequence=1).fields | {"monotonic": [1.0, 1.0, 2.0]}
CONTENT = {"rank": 1, "size": 2, "host": "a", "clock": "c", "written": 9.0, "monotonic": 9, "offset": None}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "expected a JSON object, got None"),
        (CONTENT | {"operations": [{"name": "send"}]}, "no field 'group'"),
        (CONTENT | {"operations": [FIELDS | {"nbytes": "4"}]}, "'nbytes' has the value 4"),
        (CONTENT | {"operations": [FIELDS | {"monotonic": [None, 1, 2]}]}, "'monotonic' has the value"),
        (CONTENT | {"rank": 0, "operations": []}, "it is that of rank 0 of 2 ranks"),
        (CONTENT | {"size": 4, "operations": []}, "rank-0.json is from a job of 2 ranks, rank-1.json from one of 4."),
        (CONTENT | {"operations": [FIELDS]}, None),
    ],
)
def test_dump_files_are_checked_and_copies_ignored(tmp_path: Path, content: Any, text: str | None) -> None:
    first = CONTENT | {"rank": 0, "operations": [FIELDS]}
    for name, value in (("rank-0.json", first), ("rank-0 (copy).json", first), ("rank-1.json", content)):
        (tmp_path / name).write_text(json.dumps(value))
    if text is None:
        assert [dump.rank for dump in job_trace.read(tmp_path)] == [0, 1]
    else:
        with pytest.raises(ValueError, match=re.escape(text)):
            job_trace.read(tmp_path)


# -- in a browser ------------------------------------------------------------------------------------------------------

EVENTS = """
const ready = setInterval(() => {
  if (document.body.dataset.bars === undefined) return;
  clearInterval(ready);
  run().catch(error => ({error: String(error)})).then(result => {
    const element = document.createElement("pre");
    element.id = "result";
    element.textContent = JSON.stringify(result);
    document.body.append(element);
  });
}, 20);

async function run() {
  const frame = () => new Promise(done => setTimeout(done, 100));
  const key = async name => { document.dispatchEvent(new KeyboardEvent("keydown", {key: name})); await frame(); };
  const state = () => {
    draw();  // the browser draws its frames at its own times
    const text = tooltip.hidden ? "" : tooltip.textContent;
    return {...document.body.dataset, start: view.start, end: view.end, text};
  };
  const pointer = (name, x, y) => {
    chart.dispatchEvent(new PointerEvent(name, {pointerId: 1, clientX: box.left + x, clientY: box.top + y}));
  };
  chart.setPointerCapture = () => {};  // for pointers of a device only
  const box = chart.getBoundingClientRect();
  const result = {whole: state()};
  await key("w");
  result.wait = state();
  await key("Escape");
  result.closed = state();
  await key("Home");
  chart.dispatchEvent(new WheelEvent("wheel", {deltaY: -300, clientX: box.left + width - 1, cancelable: true}));
  await frame();
  result.zoomed = state();
  pointer("pointerdown", labels + 10, 60);
  pointer("pointermove", labels + 110, 60);
  pointer("pointerup", labels + 110, 60);
  await frame();
  result.moved = state();
  await key("Home");
  const y = yOf(lanes[0]) + laneHeight / 2;
  pointer("pointermove", xOf(lanes[0].track.begins[3] + 1e6), y);
  result.hovered = state();
  await key("+");
  result.keyed = state();
  result.legend = document.getElementById("legend").textContent;
  result.hidden = document.documentElement.scrollWidth > window.innerWidth;
  result.pixels = width - labels;
  return result;
}
"""


def drawn(page: str, folder: Path, width: int = 1440) -> dict[str, Any]:
    """Return the result of the events on a page in a browser without a window."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{EVENTS}</script></body>"), encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=20000", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=time_limits.scaled(60), check=True)
    (result,) = re.findall(r'<pre id="result">(.*?)</pre>', shown.stdout) or [shown.stderr]
    return dict(json.loads(html.unescape(result)))


@needs_browser
@pytest.mark.parametrize("width", [1440, 500])
def test_a_browser_draws_the_operations_and_answers_mouse_and_keyboard(tmp_path: Path, width: int) -> None:
    result = drawn(timeline_page.page(dumps(), "page"), tmp_path, width)
    nanoseconds = 1e9 * ((STEPS - 1) * STEP + DELAY + 0.003)
    # 1. the whole time: everything is visible, each bar of at least a pixel is drawn
    whole = result["whole"]
    assert (whole["start"], whole["end"]) == pytest.approx((-0.02 * nanoseconds, 1.02 * nanoseconds))
    assert int(whole["waits"]) == (SIZE - 1) * STEPS
    assert SIZE * STEPS * 2 <= int(whole["bars"]) <= SIZE * STEPS * 3
    assert f"all_reduce ({SIZE * STEPS})" in result["legend"]
    # 2. the longest wait, with its details
    wait = result["wait"]
    assert wait["end"] - wait["start"] == pytest.approx(3e9 * DELAY)
    assert f"wait for rank {LATE}: {1e3 * DELAY:.3f} ms" in wait["text"].splitlines()
    assert wait["text"].endswith("train.py:7 (<step>)")
    assert 0 < int(wait["bars"]) < int(whole["bars"])
    assert result["closed"]["text"] == ""
    # 3. the wheel zooms at its position, dragging moves, and hovering shows an operation
    zoomed, moved = result["zoomed"], result["moved"]
    assert zoomed["end"] - zoomed["start"] == pytest.approx(1.04 * nanoseconds / 2.718281828, rel=1e-6)
    assert zoomed["end"] == pytest.approx(1.02 * nanoseconds, rel=0.01)
    assert moved["end"] - moved["start"] == pytest.approx(zoomed["end"] - zoomed["start"])
    assert zoomed["start"] - moved["start"] == pytest.approx(
        100 / result["pixels"] * (zoomed["end"] - zoomed["start"]), rel=1e-6
    )
    assert result["hovered"]["text"].startswith(f"all_reduce #3\nrank 0 on {HOST}, group 0\nfloat32[1024], 4,096 bytes")
    assert result["keyed"]["end"] - result["keyed"]["start"] == pytest.approx(0.6 * 1.04 * nanoseconds)
    assert not result["hidden"], "the page is wider than the window"


@needs_browser
def test_a_large_trace_is_drawn_by_the_pixel(tmp_path: Path) -> None:
    size, steps = 8, 5000
    result = drawn(timeline_page.page(dumps(size, steps), "page"), tmp_path)
    lanes = 2 * size
    assert 0 < int(result["whole"]["bars"]) <= lanes * result["pixels"]
    assert int(result["whole"]["messages"]) == -1, "more messages than the page can show"
    assert int(result["wait"]["messages"]) > 0
