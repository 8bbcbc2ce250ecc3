"""Epochs of a run whose weights can be requested, and the metrics that select the best ones. Light to import.

The last epoch is a run's result. A run can also keep the best epoch on held-out training classes, a valid selection, and the best on the
test classes: an oracle, which selects nothing here and is kept because papers report it. Ties keep the earliest epoch.
"""

from typing import Literal, get_args

KeptEpoch = Literal["best_validation", "oracle"]
Epoch = Literal["last", "best_validation", "oracle"]
EPOCHS: tuple[Epoch, ...] = get_args(Epoch)
CURVE: dict[str, str] = {"train": "train_recall_at_1", "test": "test_recall_at_1"}  # the history's Recall@1 over epochs, by role
RECALL: dict[str, str] = {"best_validation": "validation_recall_at_1", "oracle": "oracle_recall_at_1"}  # names in the history
