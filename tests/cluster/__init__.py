"""A Slurm cluster on one machine: real daemons on virtual hosts, which are kernel namespaces."""
