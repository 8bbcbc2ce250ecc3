"""Backbones: images (N, 3, H, W) in, feature maps (N, F, h, w) out. Names in `registry.py`, weights in `weights.py`."""
