"""Plots and galleries: each function takes arrays and a path and writes one PNG."""

from dml_core.extras import require

require("matplotlib")
