"""Searching a row's settings (`dml tune`): what may be tried, on which images, in which order, and what came of it."""
