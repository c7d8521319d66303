"""Reports of runs and benchmarks from their files: metrics, tables and plots. Requires neither torch nor MPI."""
