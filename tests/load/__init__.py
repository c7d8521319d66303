"""Benchmarks of the backend under load. They are not tests, because a busy machine would fail them."""
