"""MLflow; the only place that knows it."""
