"""A stand-in for `apptainer exec`: real mount, PID, IPC and user namespaces by bubblewrap, for sandbox images.

It accepts only options that Apptainer 1.4 documents, and models its defaults as the user guide describes them: the
container shares /dev (with /dev/shm), /proc, /sys, /tmp, the home directory, the working directory, and the network,
PID and IPC namespaces. All variables enter it except LD_LIBRARY_PATH and those that the image sets, such as PATH.
`--contain` gives it a /dev, /dev/shm, /tmp and home directory of its own, `--containall` a PID and an IPC namespace and
an empty environment in addition. The file system of the image is read-only.

An image is a directory with two files: `contents`, the paths of this machine that the image contains, one per line as
PATH or PATH:PATH_IN_IMAGE, and `environment`, the variables that its %environment sets, one per line as NAME=VALUE.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

PLACE = "/opt/image"
"""The path of the environment in the images of `make`."""

_CONTENTS, _ENVIRONMENT = "contents", "environment"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
_PREFIX = "APPTAINERENV_"


def problem() -> str | None:
    """Return the reason why this machine cannot run containers; None if it can."""
    bwrap = shutil.which("bwrap")
    if not bwrap or subprocess.run([bwrap, "--dev-bind", "/", "/", "true"], check=False).returncode:
        return "bubblewrap cannot make namespaces here (apt-get install bubblewrap)"
    return None


def make(folder: Path, environment: Path) -> tuple[Path, Path]:
    """Make an image with a Python environment at another path and the checkout.

    Returns:
        The image, and a directory for PATH with the command `apptainer`.
    """
    image, commands = folder / "image", folder / "bin"
    image.mkdir()
    commands.mkdir()
    system = [path for path in _SYSTEM if Path(path).exists()]
    contents = [*system, sys.base_prefix, f"{environment}:{PLACE}", str(Path(__file__).resolve().parents[1])]
    (image / _CONTENTS).write_text("\n".join(dict.fromkeys(contents)))
    (image / _ENVIRONMENT).write_text(f"PATH={PLACE}/bin:/usr/bin:/bin\nDATA=of the image\n")
    command = commands / "apptainer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).resolve()} "$@"\n')
    command.chmod(0o755)
    return image, commands


def main() -> None:
    options, image, command = _parsed(sys.argv[1:])
    if not (image / _CONTENTS).is_file():
        sys.exit(f"FATAL:   could not open image {image}: failed to retrieve path for {image}")
    is_contained = options.contain or options.containall
    environ = _environ(image, is_clean=options.cleanenv or options.containall)
    os.execvpe(
        "bwrap",
        ["bwrap", *_namespaces(options), *_mounts(options, image, is_contained=is_contained), "--", *command],
        environ,
    )


def _parsed(words: list[str]) -> tuple[argparse.Namespace, Path, list[str]]:
    parser = argparse.ArgumentParser("apptainer", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    execute = commands.add_parser("exec", allow_abbrev=False)
    for flags in (("-c", "--contain"), ("-C", "--containall"), ("-e", "--cleanenv"), ("-p", "--pid"), ("-i", "--ipc")):
        execute.add_argument(*flags, action="store_true")
    for flags in (("-u", "--userns"), ("--nv",), ("--rocm",)):
        execute.add_argument(*flags, action="store_true")
    execute.add_argument("-B", "--bind", action="append", default=[])
    execute.add_argument("--pwd", "--cwd", default=os.environ.get("PWD", str(Path.cwd())))
    execute.add_argument("image", type=Path)
    execute.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    for flag in ("contain", "containall", "cleanenv", "pid", "ipc", "userns"):
        if os.environ.get(f"APPTAINER_{flag.upper()}") in ("1", "true"):
            setattr(options, flag, True)
    return options, options.image, options.command


def _namespaces(options: argparse.Namespace) -> list[str]:
    words = ["--die-with-parent"] if options.pid or options.containall else []
    words += ["--unshare-pid"] * (options.pid or options.containall)
    words += ["--unshare-ipc"] * (options.ipc or options.containall)
    words += ["--unshare-user"] * options.userns
    return words


def _mounts(options: argparse.Namespace, image: Path, *, is_contained: bool) -> list[str]:
    home, directory = str(Path.home()), str(Path.cwd())
    words = ["--tmpfs", "/"]
    # 1. the binds of the default configuration
    for path in ("/tmp", "/var/tmp", home):
        words += ["--tmpfs", path] if is_contained else ["--bind", path, path]
    words += ["--dev", "/dev"] if is_contained else ["--dev-bind", "/dev", "/dev"]
    words += ["--proc", "/proc"] if options.pid or options.containall else ["--bind", "/proc", "/proc"]
    words += ["--ro-bind", "/sys", "/sys"]
    # 2. the file system of the image; the directories above are those of this machine, and could hide it
    for line in (image / _CONTENTS).read_text().split():
        source, _, target = line.partition(":")
        is_link = Path(source).is_symlink()
        words += ["--symlink", str(Path(source).readlink())] if is_link else ["--ro-bind", source]
        words.append(target or source)
    # 3. the working directory, and the user's binds
    binds = [*([] if is_contained else [directory]), *options.bind, os.environ.get("APPTAINER_BIND", "")]
    for bind in ",".join(binds).split(","):
        source, _, rest = bind.partition(":")
        target, _, flags = rest.partition(":")
        if source:
            words += ["--ro-bind" if flags == "ro" else "--bind", source, target or source]
    return [*words, "--remount-ro", "/", "--chdir", options.pwd]


def _environ(image: Path, *, is_clean: bool) -> dict[str, str]:
    kept = {} if is_clean else {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    forced = {name.removeprefix(_PREFIX): value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    of_image = dict(line.split("=", 1) for line in (image / _ENVIRONMENT).read_text().splitlines())
    names = {"APPTAINER_COMMAND": "exec", "APPTAINER_CONTAINER": str(image), "APPTAINER_NAME": image.name}
    return {**kept, "HOME": str(Path.home()), **of_image, **names, **forced}


if __name__ == "__main__":
    main()
