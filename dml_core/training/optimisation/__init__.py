"""Optimisers with their groups of parameters, learning-rate schedules, and the moving average of the weights."""
