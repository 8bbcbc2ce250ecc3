"""Tracking with MLflow; no other package imports it. Functions raise TrackingError, in one line, if it cannot be used."""
