"""A Slurm cluster on one machine: real daemons, and hosts that are namespaces of the kernel."""
