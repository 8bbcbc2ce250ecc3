"""Checkpoints: the verified file of a run, and the thread that writes it while training continues."""
