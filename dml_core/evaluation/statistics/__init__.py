"""Statistics of runs and systems: confidence intervals, paired differences, comparison of several systems, mean ranks."""
