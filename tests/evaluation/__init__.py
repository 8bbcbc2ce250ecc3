"""Tests of `dml_core.evaluation`."""
