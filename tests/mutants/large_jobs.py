"""Faults in the start of large jobs: the address of the fastest network."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "by_speed",
        old="(network, -speeds[name], address not in named)",
        new="(-speeds[name], address not in named)",
        fault="Rank 0 prefers a virtual interface, whose speed the kernel invents, to InfiniBand without a speed.",
        tests="tests/unit/test_rendezvous.py -k fastest_network",
    ),
    Mutant(
        "by_speed",
        old="(network, -speeds[name], address not in named)",
        new="(network, address not in named)",
        fault="Rank 0 prefers the network of its host name to a faster one.",
        tests="tests/unit/test_rendezvous.py -k fastest_network",
    ),
    Mutant(
        "interfaces._speed",
        old="int(text) if text.isdigit() else 0",
        new="int(text)",
        fault="bootstrap() fails on a host that has an interface without a speed.",
        tests="tests/unit/test_rendezvous.py -k speed_may_be_unknown",
    ),
]
