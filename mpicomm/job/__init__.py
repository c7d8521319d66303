"""Startup of a job: topology, device assignment, rendezvous and the startup barrier."""
