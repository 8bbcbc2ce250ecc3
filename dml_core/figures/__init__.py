"""Plots and galleries: each function takes arrays and a path and writes one PNG."""
