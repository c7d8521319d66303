"""Fault injection: `ways` lists how a rank can exit or fail, `python -m tests.failures` runs each case."""
