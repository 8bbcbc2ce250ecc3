"""Score a run's embeddings, and embeddings from a user's files."""
