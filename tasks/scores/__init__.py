"""Scoring: a run's embeddings, and a person's files."""
