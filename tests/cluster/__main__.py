"""A Slurm cluster on this machine: `python -m tests.cluster up`, then `srun -N2 hostname`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster import cluster, hosts, packages
from tests.cluster import layout as layouts
from tests.cluster.layout import ClusterError, Layout

HOST_COMMANDS: dict[str, tuple[Callable[[Layout, str], None], str]] = {
    "cut": (hosts.cut, "pull a host's network cable"),
    "mend": (hosts.mend, "plug it in again"),
    "kill": (hosts.kill, "end all processes of a host at once"),
    "boot": (cluster.boot, "start a host that was killed"),
}
# Options of ssh that take a value; launchers pass such options to their agent.
_SSH_OPTIONS_WITH_VALUE = ("-o", "-l", "-p", "-i", "-F")


def main() -> int:
    """Run the command line, and return the exit status."""
    arguments = parse_arguments()
    try:
        arguments.function(arguments)
    except ClusterError as error:
        sys.stderr.write(f"cluster: {error}\n")
        return 255 if arguments.command == "ssh" else 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--number", type=int, default=0, help="which of several clusters on this machine (%(default)s)")
    parser.add_argument(
        "--directory", type=Path, help="where all of it is kept (below the directory for temporary files)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    each = commands.add_parser("install", help="install what it needs, with apt-get")
    each.set_defaults(function=lambda _: packages.install())

    each = commands.add_parser("up", help="start a cluster")
    each.add_argument("--nodes", type=int, default=4, choices=range(1, 100), metavar="N", help="hosts (%(default)s)")
    each.add_argument("--cpus", type=int, default=4, help="CPUs that Slurm sees on each (%(default)s)")
    each.add_argument("--gpus", type=int, default=2, help="GPUs that Slurm sees on each (%(default)s)")
    each.set_defaults(function=up)

    each = commands.add_parser("down", help="end it, and leave nothing")
    each.set_defaults(function=down)

    each = commands.add_parser("sh", help="run a command on a host, or a shell")
    each.add_argument("host")
    each.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    each.set_defaults(function=sh)

    each = commands.add_parser("ssh", help="the same with ssh's arguments and a new environment, for launchers")
    each.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS")
    each.set_defaults(function=ssh)

    for name, (_, text) in HOST_COMMANDS.items():
        each = commands.add_parser(name, help=text)
        each.add_argument("host")
        each.set_defaults(function=to_host)
    return parser.parse_args()


def up(arguments: argparse.Namespace) -> None:
    directory = (arguments.directory or layouts.default_directory(arguments.number)).resolve()
    layout = Layout(
        number=arguments.number,
        directory=directory,
        nodes=arguments.nodes,
        cpus=arguments.cpus,
        gpus=arguments.gpus,
        shared=layouts.paths_to_share(),
    )
    cluster.up(layout)
    sys.stdout.write(
        f"{layout.names[0]} to {layout.names[-1]} are up; they share {layout.scratch}, and nothing else in /tmp.\n"
        f"  export SLURM_CONF={layout.slurm_conf}\n"
        f"  srun -N{min(2, layout.nodes)} hostname\n"
    )


def down(arguments: argparse.Namespace) -> None:
    cluster.down(cluster.find(arguments.number, arguments.directory))


def sh(arguments: argparse.Namespace) -> None:
    layout = cluster.find(arguments.number, arguments.directory)
    command = [*hosts.enter(layout, arguments.host), "env", f"--chdir={Path.cwd()}", *(arguments.words or ["bash"])]
    os.execvp(command[0], command)


def ssh(arguments: argparse.Namespace) -> None:
    layout = cluster.find(arguments.number, arguments.directory)
    words = arguments.words
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in _SSH_OPTIONS_WITH_VALUE else 1 :]
    if not words:
        raise ClusterError("ssh needs a host.")
    command = hosts.log_in(layout, words[0].rpartition("@")[2], words[1:])
    os.execvp(command[0], command)


def to_host(arguments: argparse.Namespace) -> None:
    layout = cluster.find(arguments.number, arguments.directory)
    HOST_COMMANDS[arguments.command][0](layout, arguments.host)


if __name__ == "__main__":
    sys.exit(main())
