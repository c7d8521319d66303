"""What takes too much time or memory to be run with every change: `make limits`."""
