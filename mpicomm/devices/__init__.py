"""The accelerators of this process, of any vendor: counting them without torch, their streams, and what vendors add."""
