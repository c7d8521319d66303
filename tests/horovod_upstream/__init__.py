"""Horovod's own tests of its PyTorch API, run on mpicomm.horovod under mpirun."""
