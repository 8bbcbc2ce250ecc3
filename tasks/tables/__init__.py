"""The papers' tables and figures: their files, the runs behind them, verdicts against published figures, reports."""
