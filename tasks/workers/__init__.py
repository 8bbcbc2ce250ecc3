"""Ray; the only place that knows it, and what its workers do."""
