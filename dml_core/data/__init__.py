"""Datasets: official files in, one packed store out; transforms and samplers."""
