"""Measurements: operations beside what they are built on, steps of training, starts."""
