"""Tables and figures of the papers: their files, the runs behind them, verdicts on published values, reports."""
