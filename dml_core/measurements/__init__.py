"""Measurements of finished runs for tables, beyond the evaluator's scores: centres, distances, gradients, maps, times; one file each."""
