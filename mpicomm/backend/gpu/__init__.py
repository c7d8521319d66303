"""Tensors of GPUs: the transport to MPI, staging, the probe of GPU-aware MPI."""
