"""How an operation moves its tensor: dtypes, buffers, MPI calls, shared memory, algorithms."""
