"""Backbones: map images (N, 3, H, W) to feature maps (N, F, h, w). Names: `registry.py`; weights: `weights.py`."""
