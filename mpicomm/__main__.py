"""`python -m mpicomm`: the command, where it is not on the path."""

from __future__ import annotations

import sys

from mpicomm.cli import main

if __name__ == "__main__":
    sys.exit(main.main())
