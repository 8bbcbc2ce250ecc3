"""Metrics of deep metric learning as pure functions of arrays."""
