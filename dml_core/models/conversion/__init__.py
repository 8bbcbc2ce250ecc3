"""Conversion of weights published in other frameworks' formats to state dicts of this project's backbones. Commands: docs/models.md."""
