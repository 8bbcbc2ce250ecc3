"""Datasets: official files, the packed store, transforms and samplers."""
