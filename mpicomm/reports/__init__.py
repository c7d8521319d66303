"""What is told of runs afterwards, from the files they left: figures, tables and plots. Needs neither torch nor MPI."""
