"""Tests of tensors on GPUs, and how fast they go."""
