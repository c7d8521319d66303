"""Tests that take too much time or memory to run with every change: `make limits`."""
