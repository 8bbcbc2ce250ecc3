"""Weights published in formats of other frameworks, as state dicts of this project's backbones. Commands: docs/models.md."""
