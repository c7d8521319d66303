"""Ranks that leave a job, in every way there is: `ways` has them, `python -m tests.failures` runs them."""
