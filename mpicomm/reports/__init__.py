"""Reports of runs and benchmarks from their files: figures, tables and plots. Requires neither torch nor MPI."""
