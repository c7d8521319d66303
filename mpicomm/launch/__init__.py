"""Builds the command line and the environment of a launch; nothing here probes the host or runs a command.

A `Request` holds what the user asked for, a `Machine` and an allocation (`Slurm`, `PBS`) hold the available resources.
The modules `srun`, `mpiexec` and `torchrun` of `commands` build a `Start` from them; the caller executes it.
"""
