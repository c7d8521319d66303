"""Measurements for developers of mpicomm; README.md lists the programs. `mpicomm bench` is for users."""
