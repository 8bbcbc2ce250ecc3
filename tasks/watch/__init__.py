"""Verification of accepted results: evidence, convergence bands, verdicts, alarms, history, receipts and costs."""
