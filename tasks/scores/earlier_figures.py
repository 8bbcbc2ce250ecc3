"""Figures of earlier evaluations of the same embeddings. If only scores change, they are copied: drawing takes most of an evaluation."""

import shutil
from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from dml_core.errors import StoreError
from tasks.environment import finished_records
from tasks.runs.finished import read_finished, steps_before
from tasks.runs.records import FIGURES_FOLDER
from tasks.storage import Store

CONTENT = "figures"  # fact of a score record: hash of what its figures depend on (`tasks.scores.drawing.Drawing.content`)


class EarlierFigures:
    """The figures of the evaluations that were finished when this flow began."""

    def __init__(self, state: Path, store: Store) -> None:
        self._state, self._store = state, store

    def copy(self, embedded: str, content: str, folder: Path) -> bool:
        """Copy the figures of an evaluation of these embeddings, if it drew the same and they are intact; return whether it did.

        Args:
            embedded: identity of the embeddings.
            content: hash of what the figures depend on.
            folder: of the new evaluation.
        """
        for identity in self._evaluations.get(embedded, ()):
            # A damaged evaluation is reported by its own run; `dml gc` may remove one at any time.
            with suppress(StoreError, OSError):
                record = read_finished(finished_records(), "evaluate", identity)
                if record is not None and record.facts.get(CONTENT) == content:
                    shutil.copytree(self._store.checked(record) / FIGURES_FOLDER, folder / FIGURES_FOLDER, dirs_exist_ok=True)
                    return True
        return False

    @cached_property
    def _evaluations(self) -> dict[str, list[str]]:
        """Identity of embeddings -> identities of their evaluations."""
        evaluations: defaultdict[str, list[str]] = defaultdict(list)
        for identity, embedded in steps_before(self._state).items():
            evaluations[embedded].append(identity)
        return dict(evaluations)
