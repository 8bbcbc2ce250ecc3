"""Use of trained networks: look them up by name, export them, embed any images."""
