"""Retrieval: exact and approximate search, ranks, and the metrics computed from them."""
