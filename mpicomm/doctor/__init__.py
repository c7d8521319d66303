"""The checks of `mpicomm doctor`. Each module has the facts of one kind, and pure functions that judge them."""
