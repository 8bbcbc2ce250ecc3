"""Make the finished runs of a dataset or table its reference, after a verification has trained the same."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from dml_core.errors import ConfigError
from tasks.data import dataset_if_prepared, read_dataset
from tasks.environment import Project, finished_records
from tasks.git import recorded_commit, run_git
from tasks.locks import alone
from tasks.plans.results import load_result
from tasks.runs.finished import read_finished
from tasks.runs.identity import step_identities
from tasks.runs.params.file import load_params
from tasks.runs.specs import BY_DEFAULT, Params, RunSpec
from tasks.storage import open_store
from tasks.watch.bands import NIGHTS_PER_MONTH, seeds_needed, shared_level
from tasks.watch.evidence import collect, is_same_code
from tasks.watch.records import Acceptance, Environment, Evidence, Reference, Verdict
from tasks.watch.storage import (
    matching_rows,
    protocol_of,
    read_evidence,
    read_reference,
    read_references,
    read_verifications,
    reference_path,
    rows_today,
    write_reference,
)
from tasks.watch.verdicts import INPUTS, verdict_of
from tasks.wording import Say, counted


def accept(project: Project, name: str, why: str, rows: Sequence[str], say: Say) -> tuple[Reference, Path]:
    """Write the reference of a dataset's standing comparison or of a table, for the reason `why`; return it and its file.

    With `rows` only these are accepted; the others keep their evidence and who accepted it. The project's environment must be set; `say`
    receives progress, a line at a time.

    Raises:
        ConfigError: no reason is given, the accepted rows that stay have another protocol, or as `verified_reference`.
        StoreError: the reference cannot be written, a newer version of the program wrote it, or another one is damaged.
    """
    if not why.strip():
        raise ConfigError("--why: give the reason for accepting these results, for example --why 'first results'")
    with suppress(OSError, ValueError):  # a missing or damaged one is replaced, a newer one is not
        read_evidence(reference_path(project, name))
    specs = rows_today(load_params(project.params_file), name)
    kept = list(read_references(project, without=None if rows else name).values())
    reference = verified_reference(project, name, why, rows, kept, say)
    with alone(project.state / ".accept.lock"):
        accepted = read_reference(project, name) if rows else None
        if accepted is not None:
            if accepted.protocol != reference.protocol:
                raise ConfigError(f"{name}: the accepted rows have another protocol; accept all rows, without --row")
            new = {one.row for one in reference.evidence}
            evidence = _in_order([*reference.evidence, *(one for one in accepted.evidence if one.row not in new)], specs)
            of_newer_program = accepted.model_extra or {}
            reference = reference.model_copy(update={**of_newer_program, "evidence": evidence, "earlier": _earlier(accepted, new)})
        path = write_reference(project, reference)
    for line in _lost_bands(reference, [one for one in kept if one.name != name]):
        say(line)
    return reference, path


def verified_reference(
    project: Project, name: str, why: str, rows: Sequence[str], kept: Sequence[Reference], say: Say, num_nights: int = NIGHTS_PER_MONTH
) -> Reference:
    """Return the evidence of finished runs that a verification has trained again, without writing anything; arguments as of `accept`.

    `kept` are the references whose rows are verified in the same nights.

    Raises:
        ConfigError: git does not name the person, code differs from its commit, runs are unfinished, a row was not verified with this code,
            or the finished runs are not what the verification trained.
    """
    commit, who = recorded_commit(project.root), _person(project.root)
    params = load_params(project.params_file)
    specs = rows_today(params, name)
    finished, unfinished = find_candidates(project, params, name, {row: specs[row] for row in matching_rows(list(specs), rows)})
    _check_finished(name, unfinished, finished)
    verified = _verified(project, name, list(finished), commit)
    say(f"{name}: collecting the evidence of {counted(sum(map(len, finished.values())), 'run')}")
    level = shared_level(kept, finished, num_nights)
    note_few_seeds(finished, level, say)
    evidence = []
    for row, seeds in finished.items():
        runs = [specs[row].model_copy(update={"seed": seed}) for seed in sorted(seeds)]
        evidence += _checked(project, runs, verified[row], level, say)
    return Reference(
        name=name,
        protocol=protocol_of(params, name),
        who=who,
        why=why.strip(),
        commit=commit,
        accepted_at=datetime.now(UTC).replace(microsecond=0),
        evidence=_in_order(evidence, specs),
    )


def find_candidates(
    project: Project, params: Params, name: str, specs: Mapping[str, RunSpec]
) -> tuple[dict[str, dict[int, float]], list[tuple[str, int]]]:
    """Return the runs that the present code has finished on the present data, and those that a reference of these rows needs besides.

    Of the standing comparison the default variants must be finished, of a table all rows; each with every seed that any row has.

    Args:
        name: a dataset of the standing comparison, or a table.
        specs: row -> run with seed 0.

    Returns:
        Row -> seed -> seconds of the training, without rows that have no finished run; and (row, seed) of the others.

    Raises:
        DataError: a prepared dataset is damaged.
    """
    is_standing = name in params.comparison.datasets
    seeds = params.comparison.seeds if is_standing else sorted({run.seed for run in load_result(project, name).runs})
    finished: dict[str, dict[int, float]] = {}
    for row, spec in specs.items():
        if (dataset := dataset_if_prepared(project, spec.dataset)) is None:
            continue
        for seed in seeds:
            identities = step_identities(spec.model_copy(update={"seed": seed}), dataset)
            trained, embedded, scored = (read_finished(finished_records(), *step) for step in identities.items())
            if trained and embedded and scored and scored.is_made_from([trained, embedded]):
                finished.setdefault(row, {})[seed] = float(trained.facts.get("seconds", 0))
    used = sorted({seed for by_seed in finished.values() for seed in by_seed})
    variants = params.comparison.variants
    needed = [row for row, spec in specs.items() if row in finished or not is_standing or variants[spec.variant].get(BY_DEFAULT, True)]
    return finished, [(row, seed) for row in needed for seed in used if seed not in finished.get(row, {})]


def note_few_seeds(finished: Mapping[str, Sized], level: float, say: Say) -> None:
    """Say how many seeds a band needs, if a row has finished fewer."""
    fewest, needed = min(map(len, finished.values())), seeds_needed(level)
    if fewest < needed:
        end = "until then any other bits are drift, as each training on a GPU has"
        say(f"note: {counted(fewest, 'seed')}; {needed} are needed for a band: {end}")


def candidate_evidence(project: Project, runs: Iterable[RunSpec], environment: Environment, say: Say) -> list[Evidence]:
    """Return the evidence of finished runs (`find_candidates`), with the environment in which a verification trained the same.

    Raises:
        StoreError: a file of a run differs from its record.
    """
    store, records = open_store(project), finished_records()
    collected = [collect(spec, read_dataset(project, spec.dataset), store, records, environment, say) for spec in runs]
    return [evidence for evidence in collected if evidence is not None]


def _earlier(accepted: Reference, new: Set[str]) -> tuple[Acceptance, ...]:
    """Return who accepted the rows of a reference that stay, without the new ones."""
    before = {row for one in accepted.earlier for row in one.rows}
    last = dict.fromkeys(one.row for one in accepted.evidence if one.row not in before)
    fields = accepted.model_dump(include=set(Acceptance.model_fields))
    acceptances = [*accepted.earlier, Acceptance(rows=tuple(last), **fields)]
    stay = [one.model_copy(update={"rows": tuple(row for row in one.rows if row not in new)}) for one in acceptances]
    return tuple(one for one in stay if one.rows)


def _lost_bands(reference: Reference, others: Sequence[Reference]) -> Iterator[str]:
    """Yield a note for each other name that has enough seeds for its bands without the rows of a reference, and too few with them."""
    before, needed = (seeds_needed(shared_level(references)) for references in (others, [*others, reference]))
    for other in others:
        few = [num_seeds for num_seeds in Counter(one.row for one in other.evidence).values() if before <= num_seeds < needed]
        if few:
            yield f"note: with the rows of {reference.name}, {other.name} has too few seeds for bands: {min(few)}, and {needed} are needed"


def _person(root: Path) -> str:
    """Return name and address from git's configuration."""
    name, email = (run_git(root, "config", key) for key in ("user.name", "user.email"))
    if not name or not email:
        raise ConfigError("results are named by a person, whom git does not know: git config user.name ...; git config user.email ...")
    return f"{name} <{email}>"


def _check_finished(name: str, unfinished: Sequence[tuple[str, int]], finished: Mapping[str, object]) -> None:
    if not finished:
        remedy = f"run them with dml reproduce, imported ones with --force; then: dml verify {name}"
        raise ConfigError(f"{name}: no row is finished by this code; {remedy}")
    if unfinished:
        shown = ", ".join(f"{row} seed {seed}" for row, seed in unfinished[:3])
        more = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
        raise ConfigError(
            f"{name}: {counted(len(unfinished), 'unfinished run')}: {shown}{more}; run them with dml reproduce, "
            "imported ones with --force, or name rows with --row"
        )


def _verified(project: Project, name: str, rows: Sequence[str], commit: str) -> dict[str, list[Evidence]]:
    """Return row -> evidence of its last verification, which must be of the present code."""
    last: dict[str, tuple[str, list[Evidence]]] = {}
    for verification in read_verifications(project.state, [name]):
        for row in {run.row for run in verification.trained}:
            last[row] = verification.commit, [run for run in verification.trained if run.row == row]
    never = [row for row in rows if row not in last]
    old = [row for row in rows if row in last and not is_same_code(project.root, last[row][0], commit)]
    for which, problem in ((never, "not verified yet"), (old, "verified with other code than the present")):
        if which:
            raise ConfigError(f"{', '.join(which)}: {problem}; run: dml verify {name}")
    return {row: last[row][1] for row in rows}


def _checked(project: Project, runs: Sequence[RunSpec], verified: Sequence[Evidence], level: float, say: Say) -> list[Evidence]:
    """Return the evidence of a row's finished runs, which must be what a verification trained: equal, or within their band."""
    finished = candidate_evidence(project, runs, verified[0].flow or verified[0].environment, say)
    for one in verified:
        alike = [run.shortened() if len(one.losses) < len(run.losses) else run for run in finished]
        verdict = verdict_of(one, alike, level)
        if verdict.verdict is Verdict.DRIFTED:
            reason = "; ".join([verdict.reason, *verdict.changed])
            again = "dml reproduce --force, then dml verify"
            has_same_input = one.settings == finished[0].settings and one.dataset == finished[0].dataset
            has_same_input &= not any(what in reason for what in INPUTS.values())
            if one.environment.device != "cpu" and has_same_input and not verdict.bands:
                again = f"on a GPU finish {seeds_needed(level)} seeds for a band, or train with scale.deterministic; then dml verify"
            raise ConfigError(f"{one.row}: the finished runs are not what the verification trained ({reason}); {again}")
    return finished


def _in_order(evidence: Sequence[Evidence], specs: Mapping[str, RunSpec]) -> tuple[Evidence, ...]:
    places = {row: place for place, row in enumerate(specs)}
    return tuple(sorted(evidence, key=lambda one: (places.get(one.row, len(places)), one.row, one.seed)))
