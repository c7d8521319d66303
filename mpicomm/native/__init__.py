"""The C library: shared memory of the ranks of one node, and a crash handler."""

MISSING_LIBRARY = (
    "the C library of mpicomm was not built: tensors of ranks on one node use MPI instead of shared memory, "
    "which is slower"
)
LIBRARY_REMEDY = (  # without --no-cache-dir, pip installs the wheel again that it has built without the library
    "Install a C compiler, then reinstall mpicomm: pip install --no-cache-dir --force-reinstall --no-deps mpicomm."
)
