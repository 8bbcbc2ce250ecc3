"""Records that MLflow has not taken yet: a sealed file each, written whole or not at all, and set aside when it is damaged."""

from pathlib import Path

from pydantic import TypeAdapter

from dml_core.errors import StoreError
from tasks.runs.records import ComparisonReport, RunReport, seal, unseal

Report = RunReport | ComparisonReport
_REPORT: TypeAdapter[Report] = TypeAdapter(Report)


def keep_report(outbox: Path, report: Report) -> Path:
    """Write a report into the outbox, beside and then renamed, and return its file.

    Raises:
        StoreError: the outbox cannot be written.
    """
    path = outbox / report.outbox_name
    beside = path.with_suffix(".partial")
    try:
        outbox.mkdir(parents=True, exist_ok=True)
        beside.write_text(seal(report.model_dump_json()))
        return beside.replace(path)
    except OSError as error:
        raise StoreError(f"{outbox}: the run's record cannot be written ({error.strerror or error}); free or change DML_STATE") from None


def read_report(path: Path) -> Report | None:
    """A report from the outbox; None where the file is damaged, which is then renamed to `<name>.damaged`."""
    try:
        return _REPORT.validate_json(unseal(path.read_bytes()))
    except ValueError:
        path.replace(path.with_name(f"{path.name}.damaged"))
        return None


def waiting_runs(outbox: Path) -> bool:
    """Whether a run's record waits; a comparison's (its name begins with ~) is delivered after them."""
    return any(not path.name.startswith("~") for path in outbox.glob("*.json"))
