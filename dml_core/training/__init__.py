"""The training loop and its parts. Depends on ranks and process groups, never on Ray."""
