"""Tests of tensors on GPUs, and measurements of their throughput."""
