"""Types what the README and the tutorial show, as a new user does: `python -m tests.walk [--write]`.

In a clone of this checkout and a new virtual environment it runs all commands in their order, and the program of each
section of the tutorial, and prints how long each takes. `--write` writes docs/results/walk.json. The commands that need
a cluster and `make test` are left out. The tests compare the output with the output shown; this program does not.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.docs import documents
from tests.docs.documents import TUTORIAL, Document, Section
from tests.examples.test_quick_start import environment
from tests.launching import ROOT

RESULTS = ROOT / "docs" / "results" / "walk.json"
_CONTENT = "seconds of each command of the README and the tutorial, in a clone and a new environment"
_LONG = ("make demo", "make test")  # they install two more environments
_LIMIT_SECONDS = 1200
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # most users are not root


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description="Type the README and the tutorial.")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walk-") as directory:
        rows = list(walk(Path(directory)))
    if arguments.write:
        head = job_info.description(_CONTENT, "python -m tests.walk --write")
        result_files.write(RESULTS, {**head, "seconds": round(sum(row["seconds"] for row in rows), 1), "steps": rows})
    sys.exit(any(row["status"] != row["expected"] for row in rows))


def walk(home: Path) -> Iterator[dict[str, Any]]:
    """Run all steps, and return a row for each; later steps do not run after an installation that failed."""
    clone, venv = home / "mpicomm", home / "venv"
    readme = documents.read(ROOT / "README.md")
    commands = [each for each in readme.commands() if each.mark != "elsewhere" and each.line not in _LONG]
    torch = next(re.finditer(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE))[0]
    installed = [
        f"git clone -q {ROOT} {clone}",
        f"python3 -m venv {venv}",
        f"{venv}/bin/pip install {torch}",
    ]
    for line in installed:
        yield (row := timed("installation", line, home, home))
        if row["status"]:
            return
    write_files(readme, clone)
    for command in commands:
        yield timed("README.md", command.line, clone, home)
    for path in TUTORIAL:
        document, directory = documents.read(path), home / path.stem
        directory.mkdir()
        write_files(document, directory)
        for section in document.sections:
            yield from of_section(document, section, directory, home)


def of_section(document: Document, section: Section, directory: Path, home: Path) -> Iterator[dict[str, Any]]:
    """Run the program of a section of the tutorial, then its commands."""
    if steps := [step for step in document.program(section) if not step.raises]:
        program = directory / f"{re.sub(r'[^a-z0-9]+', '_', section.title.lower())}.py"
        program.write_text("".join(step.code.text for step in (document.start, *steps)))
        debug = ["MPICOMM_DEBUG=1"] if section.in_debug_mode else []
        line = shlex.join([*debug, "mpicomm", "run", "-n", str(section.ranks), program.name])
        yield timed(document.path.name, line, directory, home)
    for console in section.consoles():
        for command in console:
            if command.mark != "elsewhere":
                yield timed(document.path.name, command.line, directory, home, fails=command.mark == "fails")


def write_files(document: Document, directory: Path) -> None:
    for name, text in document.files().items():
        (directory / name).write_text(text)


def timed(page: str, line: str, directory: Path, home: Path, *, fails: bool = False) -> dict[str, Any]:
    """Run a command in the new environment and a home directory of its own, and print how long it took."""
    environ = environment(home) | (_AS_ROOT if os.geteuid() == 0 else {})
    environ["PATH"] = f"{home}/venv/bin:{environ['PATH']}"
    begun = time.monotonic()
    done = subprocess.run(
        ["timeout", str(_LIMIT_SECONDS), "bash", "-c", line],
        cwd=directory,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    seconds = round(time.monotonic() - begun, 1)
    status = int(done.returncode != 0)
    shown = line.replace(str(home), "").replace(str(ROOT), "mpicomm")
    print(f"{seconds:7.1f} s  {page:28} {shown}", flush=True)
    if status != fails:
        print(f"status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}", flush=True)
    return {"page": page, "command": shown, "seconds": seconds, "status": status, "expected": int(fails)}


if __name__ == "__main__":
    main()
