"""The time from the SIGKILL of a process to the next training step: mpicomm compared with torchft."""
