"""Which epochs' weights of a run can be asked for, and what the best ones are the best by. Light to import.

The last epoch is a run's result. Beside it a run can keep the best on held-out training classes, which is a way to choose, and the best on
the test classes: an oracle, which chooses nothing here and is kept because papers print it. Of equally good epochs the earliest is kept.
"""

from typing import Literal, get_args

KeptEpoch = Literal["best_validation", "oracle"]
Epoch = Literal["last", "best_validation", "oracle"]
EPOCHS: tuple[Epoch, ...] = get_args(Epoch)
CURVE: dict[str, str] = {"train": "train_recall_at_1", "test": "test_recall_at_1"}  # the history's Recall@1 over epochs, by role
RECALL: dict[str, str] = {"best_validation": "validation_recall_at_1", "oracle": "oracle_recall_at_1"}  # as the history names them
