"""Builds the command line and the environment of a launch; nothing here probes the host or runs a command.

`launchers` and `mpi_library` describe launchers and MPI implementations, and the other modules apply the descriptions.
`detect` compares the variables of a running rank with MPI. `commands` builds a `Start` from what the user asked for, a
`Request`, and from the available resources, a `Machine` and an `Allocation`. `jobscript` writes job scripts.
"""
