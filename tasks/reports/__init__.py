"""A comparison's report: what DVC tracks, what a person reads."""
