"""Costs of the back end under load, measured: not tests, since a busy machine would fail them."""
