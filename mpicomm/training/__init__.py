"""The trainer and its parts: data, checkpoints, preemption, metrics, gradient compression."""
