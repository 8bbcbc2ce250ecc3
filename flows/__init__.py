"""The chain of a run, and the command line that starts it."""
