"""The command `mpicomm`, a module for each of its subcommands."""
