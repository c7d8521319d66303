"""Launch commands for mpiexec, srun and torchrun."""
