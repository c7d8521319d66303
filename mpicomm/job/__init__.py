"""The life of a job in this process: bootstrap, the session and its World, shutdown and recovery."""
