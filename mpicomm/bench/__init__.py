"""Measurements: operations compared with the libraries below them, training steps, startup."""
