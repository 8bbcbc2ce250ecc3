"""Tests of `dml_core.figures`."""
