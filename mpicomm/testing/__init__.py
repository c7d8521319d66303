"""Support for tests of programs that use mpicomm."""
