"""Tracking with MLflow; no other package imports it."""
