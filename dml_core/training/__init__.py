"""The training loop and what it is made of. Knows ranks and process groups, never Ray."""
