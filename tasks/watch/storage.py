"""Files of accepted references and of verifications, and the rows that a project has today.

| file | content |
|---|---|
| `results/accepted/<name>.json` | a `Reference`: committed JSON with sorted keys, the evidence of each run on a line |
| `state/verifications/<time>-<name>.json` | a `Verification`, sealed (`tasks.sealed`) |

In file names `/` is replaced by `~`. Files that are damaged, of a newer version, or cannot be written are a StoreError.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dml_core.errors import StoreError
from dml_core.files import json_sha256, read_regular
from tasks.environment import Project
from tasks.files import write_output
from tasks.runs.comparable import without_added
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING
from tasks.sealed import read_or_set_aside, write_sealed
from tasks.tables.choice import Choice
from tasks.tables.file import table_names
from tasks.tables.runs import chosen_runs, paper_protocol
from tasks.watch.evidence import row_of
from tasks.watch.records import FORMAT, Reference, Verification
from tasks.wording import check_listed

ACCEPTED = Path("results") / "accepted"  # in the project
VERIFICATIONS = "verifications"  # in the state folder


# ---------------------------------------------------------------- references


def reference_path(project: Project, name: str) -> Path:
    """Return the file of a reference."""
    return project.root / ACCEPTED / _file_name(name)


def _file_name(name: str) -> str:
    return f"{name.replace('/', '~')}.json"


def read_reference(project: Project, name: str) -> Reference | None:
    """Return the accepted reference of a table or dataset; None if there is none.

    Raises:
        StoreError: the file is damaged or has a run twice, or a newer version of the program wrote it.
    """
    path = reference_path(project, name)
    if not path.is_file():
        return None
    try:
        reference = Reference.model_validate(read_evidence(path))
    except (OSError, ValueError):
        raise StoreError(f"{path}: damaged; restore it with git, or accept again: dml accept {name} --why ...") from None
    check_runs_once(path, reference)
    return reference


def read_evidence(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write_evidence`.

    Raises:
        StoreError: a newer version of the program wrote it.
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is not JSON, or not an object.
    """
    try:
        content = json.loads(read_regular(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if isinstance(content.get("format"), int) and content["format"] > FORMAT:
        raise StoreError(f"{path}: written by a newer version (format {content['format']}); update dml-repro")
    return content


def check_runs_once(path: Path, reference: Reference) -> None:
    """Check that a reference has no run twice: its band would be that of more seeds.

    Raises:
        StoreError: it has.
    """
    for (row, seed), number in Counter((one.row, one.seed) for one in reference.evidence).items():
        if number > 1:
            raise StoreError(f"{path}: {number} runs of {row} have seed {seed}, as after a merge that kept both; keep one of them")


def read_references(project: Project, without: str | None = None) -> dict[str, Reference]:
    """Return name -> reference, of all accepted names but one.

    Raises:
        StoreError: as `read_reference`.
    """
    names = [path.stem.replace("~", "/") for path in sorted((project.root / ACCEPTED).glob("[!.]*.json"))]
    return {name: reference for name in names if name != without and (reference := read_reference(project, name)) is not None}


def write_reference(project: Project, reference: Reference) -> Path:
    """Write a reference, replacing an earlier one; return its file.

    Raises:
        StoreError: it cannot be written.
    """
    path = reference_path(project, reference.name)
    write_evidence(path, reference.model_dump(mode="json"))
    return path


def write_evidence(path: Path, content: dict[str, Any]) -> None:
    """Write a reference's content as JSON with sorted keys, each run on a line.

    Raises:
        StoreError: it cannot be written.
    """
    runs = ",\n".join(json.dumps(evidence, sort_keys=True) for evidence in content["evidence"])
    texts = {key: f"[\n{runs}\n]" if key == "evidence" else json.dumps(content[key]) for key in sorted(content)}
    fields = ",\n".join(f'"{key}": {text}' for key, text in texts.items())
    write_output(path, f"{{\n{fields}\n}}\n")


# ---------------------------------------------------------------- verifications


def write_verification(state: Path, verification: Verification) -> Path:
    """Write a verification, and return its file.

    Raises:
        StoreError: it cannot be written.
    """
    time = f"{verification.started_at:%Y%m%dT%H%M%S.%fZ}"
    path = state / VERIFICATIONS / f"{time}-{_file_name(verification.name)}"
    rows = tuple(
        row if row.is_bad or row.evidence is None else row.model_copy(update={"evidence": row.evidence.shortened()})
        for row in verification.rows
    )
    write_sealed(path, verification.model_copy(update={"rows": rows}))
    return path


def read_verifications(state: Path, names: Iterable[str] = ()) -> list[Verification]:
    """Return the verifications of some names, or of all, oldest first; damaged files are renamed with a warning.

    Those of the future are omitted, which began while the clock was wrong: they would be the last ones until then.

    Raises:
        NewerFormatError: a newer version of the program wrote one.
    """
    wanted = {_file_name(name) for name in names}
    paths = [path for path in sorted((state / VERIFICATIONS).glob("*.json")) if not wanted or path.name.partition("-")[2] in wanted]
    verifications = [one for path in paths if (one := read_or_set_aside(path, Verification)) is not None]
    return sorted((one for one in verifications if one.started_at <= datetime.now(UTC)), key=lambda verification: verification.started_at)


# ---------------------------------------------------------------- rows of today


def names_today(params: Params) -> list[str]:
    """Return the datasets of the standing comparison and the tables, which can be verified."""
    return [*params.comparison.datasets, *(table for table in table_names() if table != STANDING)]


def rows_today(params: Params, name: str) -> dict[str, RunSpec]:
    """Return row -> its run with seed 0, for all rows of a dataset's standing comparison or of a table; datasets are the project's.

    Raises:
        ConfigError: the name is unknown, or no row of it can be run.
    """
    known = names_today(params)
    check_listed("dataset of the comparison or table", name, known, "`dml tables` lists the papers' tables")
    if name in params.comparison.datasets:
        runs = comparison_runs(params, name, None, (0,))
    else:
        runs = [spec for specs in chosen_runs(params, (name,), Choice(seeds=(0,))).runs for spec in specs]
    return {row_of(spec): spec for spec in runs}


def protocol_of(params: Params, name: str) -> str:
    """Return the hash of the settings that the rows of a dataset's standing comparison, or of a table's paper, share."""
    if name in params.comparison.datasets:
        evaluation = without_added("evaluation", params.evaluation.model_dump(mode="json"))
        content = [params.comparison.protocol, params.comparison.datasets[name], evaluation]
    else:
        content = [paper_protocol(name).model_dump(mode="json", exclude={"independent"})]
    return json_sha256(content)


def matching_rows(rows: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the rows that a person names by their full name, or by a part between their separators, as `softtriple`; all without names.

    Raises:
        ConfigError: a name matches no row.
    """
    if not wanted:
        return list(rows)
    for text in wanted:
        if not any(_is_named(row, text) for row in rows):
            check_listed("row", text, {_short_name(row) for row in rows})
    return [row for row in rows if any(_is_named(row, text) for text in wanted)]


def _is_named(row: str, text: str) -> bool:
    return text in (row, _short_name(row), _short_name(row).partition(" ")[0])


def _short_name(row: str) -> str:
    """Return the variant of a standing row, or the label of a table's row."""
    return row.split(":")[1] if ":" in row else row.partition("/")[2]
