"""A stand-in for the mpiexec of PALS: accepts the options that HPE and ALCF document, and rejects every other one.

It places the ranks on the hosts, binds them, and sets their variables as PALS does. MPICH's mpiexec, which the
environment variable STAND_IN_HYDRA names, connects them. Sources: `mpiexec/cli.py` of HPE's craycli, Slurm's plugin
mpi/cray_shasta (the variables of a rank), and "Running Jobs on Aurora" of ALCF (--gpu-bind, --genv, --no-vni, and
--env with NAME=VALUE).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

HYDRA = "STAND_IN_HYDRA"
VERSION = "mpiexec version 1.8.0 revision 0000000"
_SHORT = {"-n": "--np", "-f": "--hostfile", "-d": "--depth", "-l": "--label"}
_SAME = {"--host": "--hosts", "--hostlist": "--hosts", "--genv": "--env"}
_WITH_VALUE = re.compile(
    "--(np|ppn|soft|hosts|hostfile|arch|wdir|path|file|umask|env|envlist|cpu-bind|mem-bind|gpu-bind|depth|"
    "include-tasks|exclude-tasks|procinfo-file|pmi|rlimits)"
)
_FLAGS = re.compile(
    "--(configfile|envall|envnone|(no-)?transfer|(no-)?label|exclusive|shared|(no-)?line-buffer|"
    "(no-)?abort-on-failure|(no-)?sstartup|no-vni)"
)
_BINDINGS = ("none", "numa", "socket", "core", "thread", "depth", "list", "mask")
_ABORTED = 143  # PALS ends the other ranks with SIGTERM, and exits with the highest status


def main(words: Sequence[str]) -> NoReturn:
    if list(words) == ["--version"]:
        print(VERSION)
        sys.exit(0)
    options, program = _parse(list(words))
    ranks, hosts = int(options.get("--np", "1")), _hosts(options)
    per_node = int(options.get("--ppn", "0")) or -(-ranks // len(hosts))
    if ranks > per_node * len(hosts):
        _fail(f"{ranks} ranks do not fit on {len(hosts)} hosts with {per_node} ranks each")
    used = hosts[: -(-ranks // per_node)]
    counts = [min(per_node, ranks - per_node * node) for node in range(len(used))]
    label = ["-prepend-rank"] if "--label" in options else []
    placed = ["-n", str(ranks), "-hosts", ",".join(f"{host}:{n}" for host, n in zip(used, counts, strict=True))]
    child = [sys.executable, str(Path(__file__).with_name("rank.py")), str(per_node), *_binding(options), *program]
    command = [os.environ[HYDRA], *placed, *label, *child]
    if "--no-abort-on-failure" in options:
        os.execve(command[0], command, {**os.environ, "STAND_IN_PMI": options.get("--pmi", _pmi())})
    done = subprocess.run(command, env={**os.environ, "STAND_IN_PMI": options.get("--pmi", _pmi())}, check=False)
    sys.exit(_ABORTED if done.returncode else 0)


def _parse(words: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        name, has_value, value = word.partition("=")
        long = _SHORT.get(name, name if name.startswith("--") else f"-{name}")
        option = _SAME.get(long, long)
        if _WITH_VALUE.fullmatch(option):
            options[option] = value if has_value else words.pop(0)
        elif _FLAGS.fullmatch(option) and not has_value:
            options[option] = ""
        else:
            _fail(f"unrecognized option '{word}'")
        if option == "--env":
            name, _, value = options[option].partition("=")
            os.environ[name] = value
    if not words:
        _fail("no executable")
    return options, words


def _hosts(options: dict[str, str]) -> list[str]:
    file = options.get("--hostfile") or os.environ.get("PALS_HOSTFILE") or os.environ.get("PBS_NODEFILE")
    if "--hosts" in options:
        names = options["--hosts"].split(",")
    elif file:
        names = Path(file).read_text().split()
    else:
        names = [os.uname().nodename]
    if unknown := [name for name in names if ":" in name or "=" in name]:
        _fail(f"host {unknown[0]} is not a name")
    return list(dict.fromkeys(names))


def _binding(options: dict[str, str]) -> list[str]:
    """Return the arguments of `rank.py`: the kind of binding, and the number of CPUs of each rank."""
    kind = options.get("--cpu-bind", os.environ.get("PALS_CPU_BIND", "thread")).partition(":")[0]
    if kind not in _BINDINGS:
        _fail(f"invalid CPU binding {kind}")
    return [kind, options.get("--depth", os.environ.get("PALS_DEPTH", "1")) if kind == "depth" else "1"]


def _pmi() -> str:
    return os.environ.get("PALS_PMI", "cray")


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"mpiexec: {message}\n")
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
