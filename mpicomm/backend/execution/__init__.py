"""When and on which thread an operation runs: executor, worker, works and messages."""
