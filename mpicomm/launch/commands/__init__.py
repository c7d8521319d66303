"""The command lines of launchers: mpiexec, srun and torchrun."""
