"""Examples: each runs on its own, and says in its docstring what it shows, with which command, and what comes out."""
