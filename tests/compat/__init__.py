"""The compatibility suite: tests of every part of the package with other versions of torch, MPI, mpi4py and NumPy."""
