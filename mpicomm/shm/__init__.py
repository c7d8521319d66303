"""Collective operations of ranks that share a node's memory."""
