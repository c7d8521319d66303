"""Tests of tensors on GPUs."""
