"""Metrics of the field as pure functions of arrays."""
