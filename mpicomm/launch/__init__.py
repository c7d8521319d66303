"""Builds the command line and the environment of a launch.

`known_launchers` and `mpi_library` describe launchers and MPI implementations; the other modules use the descriptions.
`detect` compares the variables of a running rank with MPI. `selection` selects the launcher of a launch, and `commands`
builds a `Start` from what the user asked for, a `Request`, and from the available resources, a `Machine` and an
`Allocation`. `jobscript` writes job scripts.

Only `queries` runs commands, those of launchers and schedulers; all other modules are pure.
"""
