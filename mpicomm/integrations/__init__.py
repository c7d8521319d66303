"""Adapters with which other libraries run on the job that `bootstrap()` forms; each is an extra of the package."""
