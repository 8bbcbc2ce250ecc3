"""Packed datasets: rows, the Arrow store, resizing, decoding, and the validation split by class."""
