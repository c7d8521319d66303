"""Kill training runs at every point of saving and at random moments: `python -m tests.training --each 10`.

Every start must resume from the last complete checkpoint. The final parameters, optimizer state and metrics must be
bit-identical to those of a run that was never killed.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time

from tests.training import kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=10, help="kills at each point of saving (%(default)s)")
    parser.add_argument("--moments", type=int, default=30, help="kills at random moments (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    arguments = parser.parse_args()
    begun = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    bad = 0
    folder = tempfile.mkdtemp(prefix="runs-")
    for chain in kills.chains(folder, arguments.each, arguments.moments, arguments.ranks, arguments.seed):
        counts[chain.what] += chain.kills
        bad += bool(chain.problems)
        sys.stdout.write(f"{chain.what}: {chain.kills} kills, {'; '.join(chain.problems) or 'bit-identical'}\n")
        sys.stdout.flush()
    total = ", ".join(f"{count} at {what}" for what, count in counts.items())
    seconds = time.monotonic() - begun
    sys.stdout.write(f"{sum(counts.values())} kills ({total}), {bad} runs not as they must be; {seconds:.0f} s\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
