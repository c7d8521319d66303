"""Failure handling: detects hangs and dead ranks, reports them, and aborts the job."""
