"""Other libraries on the job that bootstrap() forms; `python -m tests.integrations --write` stores the results."""
