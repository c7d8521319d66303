"""Programs that are legal on Gloo, run on Gloo and on this back end: `python -m tests.programs` under mpirun."""
