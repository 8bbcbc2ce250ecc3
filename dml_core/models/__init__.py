"""Backbones, pooling and embedding heads."""
