"""`python -m mpicomm`: runs the mpicomm command where it is not on PATH."""

from __future__ import annotations

import sys

from mpicomm.cli import main

if __name__ == "__main__":
    sys.exit(main.main())
