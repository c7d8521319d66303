"""From what is asked for and what surrounds it to a command line and its environment; nothing here looks or runs.

A `Request` says what the user wants, a `Machine` and an `Allocation` what there is. `by_srun`, `by_mpiexec` and
`by_torchrun` each make a `Start` of them, which is executed by who asked.
"""
