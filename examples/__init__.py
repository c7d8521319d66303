"""Examples: each runs on its own; its docstring describes its purpose, its command and its output."""
