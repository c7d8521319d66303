"""The command `mpicomm`, one module for each subcommand."""
