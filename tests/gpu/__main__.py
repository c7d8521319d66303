"""Runs the tests, random operations and examples on this machine's GPUs: `python -m tests.gpu --write`.

Ranks may share a GPU; without one, the emulated accelerator is used. The MPI library is that of this environment.
`--write` writes docs/results/gpu-tests-<device type>-<MPI>.json. With `--gpu-aware`, MPI receives the addresses of GPU
tensors, and the name of the file ends with `-gpu-aware`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import rank_results
from mpicomm import job_info, mpi
from mpicomm.devices import accelerator, vendor_backends, vendors
from mpicomm.reports import result_files
from tests.launching import ROOT, on_ranks, run_within

SECONDS = 900.0
"""The time limit of a command."""

_SUMMARY = re.compile(
    r"\d+ (?:passed|failed).*|\d+ operations on .* wrong|test accuracy.*|held-out loss [\d.]+|"
    r"\w+Error: .*|.*continued from.*"
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a part."""

    commands: Sequence[str]
    statuses: Sequence[int | None]
    """The exit statuses of the commands; None at the time limit."""

    seconds: float
    summary: Sequence[str]
    """The lines of the output that count results, or name an error."""

    @property
    def is_good(self) -> bool:
        return not any(status != 0 for status in self.statuses)


Commands = Sequence[Sequence[str]]
"""Commands that run one after the other; each exits with status 0 if its results are correct."""

EXAMPLES = {
    "p2p": [[]],
    "collectives": [[]],
    "ddp": [[]],
    "model_parallel": [[]],
    "fsdp": [["--dir", "fsdp"]],
    "trainer": [["--dir", "float32", "--epochs", "6"], ["--dir", "float32", "--epochs", "12"]],
    "trainer, bfloat16": [["--dir", "bfloat16", "--precision", "bfloat16"]],
    "trainer, float16": [["--dir", "float16", "--precision", "float16"]],
}
"""The arguments of each run of an example; `--dir` is below the directory of all files."""


def parts(directory: str) -> dict[str, Commands]:
    """Return the parts by name; the examples keep their files in `directory`."""
    commands: dict[str, Commands] = {}
    for ranks in (2, 4):
        commands[f"tests, {ranks} ranks"] = [
            on_ranks(ranks, ["-m", "pytest", "--with-mpi", "--color=no", "-q", "tests/gpu"])
        ]
        commands[f"random operations, {ranks} ranks"] = [
            on_ranks(ranks, ["-m", "tests.gpu.fuzz", "--seeds", "0:20", "--operations", "500"])
        ]
    for backend in ("MPI", "NCCL")[: 1 + _has_nccl()]:
        files = f"{directory}/{backend}"
        for name in EXAMPLES:
            commands[f"{name}, {backend}"] = [on_ranks(2, program) for program in _example(name, files, backend)]
        if mpi.library().vendor == "Open MPI":  # which can continue without a rank
            launcher = [sys.executable, "-m", "mpicomm", "run", "-n", "3", "--fault-tolerant"]
            trainer = ["mpicomm.examples.trainer", "--kill", "20", "--dir", f"{files}/killed"]
            commands[f"trainer without a killed rank, {backend}"] = [
                [*launcher, "-m", "tests.gpu.program", backend, *trainer]
            ]
    return commands


def _has_nccl() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def _example(name: str, directory: str, backend: str) -> list[list[str]]:
    program = ["-m", "tests.gpu.program", backend, f"mpicomm.examples.{name.partition(',')[0]}"]
    runs = [
        [f"{directory}/{word}" if "--dir" in run[:index][-1:] else word for index, word in enumerate(run)]
        for run in EXAMPLES[name]
    ]
    return [[*program, *run] for run in runs]


def run(commands: Commands, log: Path) -> Result:
    """Run the commands of a part; write their output to a file."""
    start, statuses, output = time.monotonic(), [], ""
    for command in commands:
        outcome = run_within(SECONDS, command, cwd=ROOT)
        statuses.append(outcome.status)
        output += f"{outcome.stdout}\n{outcome.stderr}\nexit status {outcome.status}\n"
        log.write_text(output)
    summary = list(dict.fromkeys(_SUMMARY.findall(output)))
    return Result([_shown(command) for command in commands], statuses, round(time.monotonic() - start, 1), summary)


def _shown(command: Sequence[str]) -> str:
    """Return a command without the paths of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in command]
    return shlex.join(["python" if word.startswith("python3") else word for word in words])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", help="name of a part, or its start; repeatable (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="number of parts that run at a time (%(default)s)")
    parser.add_argument("--logs", type=Path, help="directory of the output of each part (default: a temporary one)")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=ROOT / "docs" / "results", help="directory of the results file"
    )
    parser.add_argument("--gpu-aware", action="store_true", help="set MPICOMM_GPU_AWARE=1")
    options = parser.parse_args()
    if options.part and options.write:
        parser.error("--write needs the results of all parts: omit --part")
    if options.gpu_aware:
        os.environ["MPICOMM_GPU_AWARE"] = "1"
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        chosen = {
            name: commands
            for name, commands in parts(directory).items()
            if not options.part or any(name.startswith(start) for start in options.part)
        }
        if not chosen:
            parser.error(f"no part begins with {' or '.join(options.part)}; expected {', '.join(parts(directory))}")
        logs = options.logs or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            futures = {
                pool.submit(run, commands, logs / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"): name
                for name, commands in chosen.items()
            }
            results = {}
            for future in concurrent.futures.as_completed(futures):
                name, result = futures[future], future.result()
                results[name] = result
                end = "passed" if result.is_good else f"FAILED: exit statuses {result.statuses}"
                print(f"{name}: {end} ({result.seconds:.0f} s); {'; '.join(result.summary)}", flush=True)
    if options.write:
        _write(options.write, results, is_gpu_aware=options.gpu_aware)
    return 0 if all(result.is_good for result in results.values()) else 1


def _write(directory: Path, results: dict[str, Result], *, is_gpu_aware: bool) -> None:
    kind = (accelerator.is_available() and vendor_backends.device_type()) or "emulated"
    library = mpi.library()
    devices = {
        "type": kind,
        "names": [accelerator.device_name(torch.device(kind, index)) for index in range(accelerator.count())],
        "GPU-aware MPI": is_gpu_aware,
        **vendors.vendor().versions(),
    }
    name = "-".join(["gpu-tests", kind, rank_results.mpi_name(library.vendor), *["gpu-aware"] * is_gpu_aware])
    contents = "ends of programs on GPUs that their ranks may share"
    head = job_info.description(contents, shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]]))
    parts = {name: dataclasses.asdict(results[name]) for name in sorted(results)}
    result_files.write(directory / f"{name}.json", {**head, "devices": devices, "parts": parts})


if __name__ == "__main__":
    sys.exit(main())
