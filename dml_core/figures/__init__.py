"""Plots and galleries made from arrays: each function takes arrays and a path and writes one PNG."""
