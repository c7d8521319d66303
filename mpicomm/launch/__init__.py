"""Builds the command line and the environment of a launch; nothing here probes the host or runs a command.

`known_launchers` and `mpi_library` describe launchers and MPI implementations; the other modules use the descriptions.
`detect` compares the variables of a running rank with MPI. `commands` builds a `Start` from what the user asked for, a
`Request`, and from the available resources, a `Machine` and an `Allocation`. `jobscript` writes job scripts.
"""
