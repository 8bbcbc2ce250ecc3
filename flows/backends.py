"""Places where a project's runs are kept and published: its store, MLflow, and the commit they are tagged with."""

from functools import cache, cached_property
from typing import TYPE_CHECKING

from tasks.environment import Project
from tasks.git import git_tags
from tasks.locks import running
from tasks.runs.specs import RunSpec
from tasks.sealed import check_formats
from tasks.storage import open_store
from tasks.tracking.published import CurrentRuns, current_runs

if TYPE_CHECKING:
    from tasks.tracking.tracker import Tracker

_check_formats = cache(check_formats)  # of thousands of files, once a process


class Backends:
    """Store and MLflow of a project. Until it is closed, `dml gc` deletes nothing.

    Raises:
        StoreError: the store cannot be written, or a newer version of the program wrote the state.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self.tags = git_tags(project)
        self.store = open_store(project)
        self.store.check_writable()
        _check_formats(project.state)
        self._running = running(self.store.locks)
        self._published: dict[str, CurrentRuns] = {}

    @cached_property
    def tracker(self) -> "Tracker":
        """Publisher to MLflow, which takes seconds to import."""
        from tasks.tracking.tracker import Tracker

        return Tracker(self.project.tracking_uri, self.project.state, self.store)

    def published(self, spec: RunSpec) -> CurrentRuns:
        """Return the runs of a run's comparison that MLflow had when this was first asked."""
        if spec.comparison not in self._published:
            self._published[spec.comparison] = current_runs(self.project.tracking_uri, spec.dataset, spec.comparison)
        return self._published[spec.comparison]

    def close(self) -> None:
        """Let `dml gc` delete again."""
        self._running.release(remove=True)
