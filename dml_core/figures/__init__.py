"""Plots and galleries made from arrays."""
