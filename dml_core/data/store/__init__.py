"""Packed datasets: rows, the Arrow store, resizing for it, decoding, the split that holds classes out."""
