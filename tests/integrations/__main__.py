"""Run the tests of the integrations: `python -m tests.integrations [--write] [NAME ...]`.

Without names, it runs all of them. With `--write`, it writes docs/results/integrations-NAME.json for each.
`make integrations` does so in an environment that contains the packages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tests.integrations.records import Recorder

_HERE = Path(__file__).parent


def main() -> int:
    names = sorted(path.stem.removeprefix("test_") for path in _HERE.glob("test_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.integrations", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write docs/results/integrations-NAME.json")
    args = parser.parse_args()
    recorder = Recorder()
    files = [str(_HERE / f"test_{name}.py") for name in args.names or names]
    status = pytest.main(["-v", *files], plugins=[recorder])
    for path in recorder.write() if args.write else ():
        sys.stdout.write(f"{path}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
