"""Verify references: train rows again, collect their evidence, judge it, and write a `Verification` for each reference.

A dataset or table without an accepted reference is compared with the finished runs of the store: the first step towards accepting them.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from dml_core.config import refuse_repeats
from dml_core.data.store.info import INFO_FILE
from dml_core.errors import ConfigError, DataError, DmlError, StoreError
from tasks.data import changed_datasets, read_dataset, unchanged_dataset, update_dataset
from tasks.dvc_lock import or_pull
from tasks.environment import Project
from tasks.git import code_commit
from tasks.plans.times import placement_here
from tasks.runs.costs import has_begun
from tasks.runs.identity import step_identities
from tasks.runs.params.comparison import check_seeds
from tasks.runs.params.file import load_params
from tasks.runs.replaced_data import users
from tasks.runs.specs import Params, RunSpec
from tasks.tables.file import load_table, table_names
from tasks.tables.runs import at_scale, run_together
from tasks.watch.accepting import candidate_evidence, find_candidates, note_few_seeds
from tasks.watch.alarms import notify
from tasks.watch.bands import NIGHTS_PER_MONTH, shared_level
from tasks.watch.evidence import collect, environment_here, settings_hash
from tasks.watch.fresh_runs import Workspace, remove_steps, train, workspace
from tasks.watch.records import Evidence, Receipt, Reference, RowVerdict, Verdict, Verification
from tasks.watch.rotation import Night, Turn, correction_of, drawn_turns, groups_of, plan_night, predicted_seconds, turns_of
from tasks.watch.storage import matching_rows, names_today, protocol_of, read_references, read_verifications, rows_today, write_verification
from tasks.watch.verdicts import first_difference, verdict_of
from tasks.wording import Say

Room = Callable[[], AbstractContextManager[None]]
END_SECONDS = 20.0  # of a budget, for ending runs that are not finished
COLLECT_SECONDS = 3.0  # of a budget, for the evidence of a run


@checked_dataclass(frozen=True)
class VerifyRequest:
    """Rows and seeds to verify; by default every row of every accepted reference, with one seed each."""

    names: tuple[str, ...] = Field(default=(), description="Datasets of the comparison, or tables; by default all that are accepted.")
    rows: tuple[str, ...] = Field(default=(), description="Only these rows.")
    seeds: tuple[int, ...] = Field(default=(), description="These seeds; by default, of each row, the accepted seed verified longest ago.")
    share: float = Field(default=1.0, gt=0, le=1, description="Share of the rows, those verified longest ago first.")
    budget_minutes: float | None = Field(default=None, gt=0, description="Most minutes; rows that do not fit wait for the next time.")
    keep: bool = Field(default=False, description="Keep the files of the runs, below state/verify, until the next verification.")
    deterministic: bool = Field(
        default=False, description="Use torch's deterministic algorithms; a run with an operation that has none fails with its name."
    )


@dataclass(frozen=True)
class Verified:
    """Result of one execution.

    Attributes:
        verifications: one for each name, as written.
        references: name -> accepted reference; names without one are missing.
        folder: folder with the files of the runs; None if it was removed.
    """

    verifications: tuple[Verification, ...]
    references: dict[str, Reference]
    folder: str | None

    @property
    def has_alarm(self) -> bool:
        """True if a row drifted, failed or vanished."""
        return any(row.is_bad for verification in self.verifications for row in verification.rows)


def verify(project: Project, request: VerifyRequest, say: Say, receipt: Receipt | None = None, room: Room = nullcontext) -> Verified:
    """Verify, and write the verifications to the state folder.

    With a receipt, runs are compared with its runs instead of accepted ones, and the verifications are returned only and raise no alarm;
    the request has no names then. The project's environment must be set; `say` receives progress, a line at a time. What `room` returns is
    held while runs are trained; the budget begins when it is entered.

    Raises:
        ConfigError: a name, row or seed is unknown, nothing is accepted or finished, or no row fits into the budget and no other verdict
            raises an alarm.
    """
    return _Verifier(project, request, say, receipt, room).run()


class _Verifier:
    """One execution.

    Attributes:
        specs: name -> row -> its run with seed 0; no rows of an accepted name that the project has no more.
        accepted: name -> row -> accepted seed, or finished one of a name without a reference -> seconds of its training.
        verdicts: name -> verdicts so far.
    """

    def __init__(self, project: Project, request: VerifyRequest, say: Say, receipt: Receipt | None, room: Room = nullcontext) -> None:
        self.project, self.request, self.say, self.receipt, self.room = project, request, say, receipt, room
        self.began, self.started_at = time.monotonic(), datetime.now(UTC)
        references: dict[str, Reference] = read_references(project) if receipt is None else {receipt.name: receipt}
        num_nights = NIGHTS_PER_MONTH if receipt is None else max(1, len(request.seeds))  # a receipt's rows are verified once
        self.level = shared_level(references.values(), num_nights=num_nights)
        self.all_references = list(references.values())
        names = list(request.names or references)
        self.references = {name: references[name] for name in names if name in references}
        refuse_repeats("NAME", names)
        check_seeds(request.seeds)
        refuse_repeats("--seed", request.seeds)
        if not names:
            raise ConfigError("nothing is accepted yet; verify the finished runs of a dataset or table: dml verify NAME")
        params = load_params(project.params_file)
        today = names_today(params)
        present = names if request.names or receipt else [name for name in names if name in today]
        self.params = _with_resources(params, present)
        if request.deterministic:
            scale = self.params.scale.model_copy(update={"deterministic": True})
            self.params = self.params.model_copy(update={"scale": scale})
        self.specs = {name: rows_today(self.params, name) if name in present else {} for name in names}
        self.num_parallel = placement_here(self.params.scale).num_groups
        self.commit = code_commit(project.root) or "unknown"
        self.verdicts: dict[str, list[RowVerdict]] = {name: [] for name in names}
        self.accepted: dict[str, dict[str, dict[int, float]]] = {}
        all_rows = {name: _rows_of(self.references.get(name), self.specs[name] if receipt is None else {}) for name in names}
        wanted = matching_rows([row for rows in all_rows.values() for row in rows], request.rows)
        for name in names:
            rows = [row for row in all_rows[name] if row in wanted]
            reference = self.references.get(name)
            self.accepted[name] = self._from_store(name, rows) if reference is None else self._from_reference(name, reference, rows)

    # ------------------------------------------------------------ what is compared

    def _from_reference(self, name: str, reference: Reference, rows: Sequence[str]) -> dict[str, dict[int, float]]:
        """Return the rows to verify; give verdicts on those that vanished, are new, or have other settings, which are not trained."""
        if self.specs[name] and reference.protocol != protocol_of(self.params, name):
            self.say(f"{name}: the protocol differs from the accepted one; rows with other settings are not compared")
        accepted: dict[str, dict[int, float]] = {}
        for row in rows:
            spec, evidence = self.specs[name].get(row), reference.of_row(row)
            if not self.specs[name]:
                reason = f"accepted, but the project has no row of {name}; restore {name}, or remove its file from results/accepted"
                self._settle(name, row, Verdict.VANISHED, reason)
            elif spec is None:
                self._settle(name, row, Verdict.VANISHED, "accepted, but the project has no such row; restore it, or accept without it")
            elif not evidence:
                self._settle(name, row, Verdict.NEW, f"not accepted; after a verification of it: dml accept {name} --row ... --why ...")
            elif evidence[0].settings != settings_hash(spec):
                self._settle(name, row, Verdict.DRIFTED, "the settings differ from the accepted ones; restore them, or accept new results")
            else:
                accepted[row] = {one.seed: one.seconds for one in evidence}
        return accepted

    def _from_store(self, name: str, rows: Sequence[str]) -> dict[str, dict[int, float]]:
        """Return the finished rows of a name without a reference, at least one."""
        finished = find_candidates(self.project, self.params, name, {row: self.specs[name][row] for row in rows})[0]
        if not finished:
            what = f"--dataset {name}" if name in self.params.comparison.datasets else name
            raise ConfigError(f"{name}: nothing is accepted, and no row is finished by this code; run: dml reproduce {what}")
        self.say(f"{name}: nothing is accepted; comparing with the finished runs")
        note_few_seeds(finished, shared_level(self.all_references, finished), self.say)
        return finished

    def _settle(self, name: str, row: str, verdict: Verdict, reason: str, seed: int = 0) -> None:
        self.verdicts[name].append(RowVerdict(row=row, seed=seed, verdict=verdict, reason=reason))

    # ------------------------------------------------------------ execution

    def run(self) -> Verified:
        night = self._plan()
        folder, late, too_long = None, list[Turn](), list[Turn]()
        if night.turns:
            changed = {"scale": {"deterministic": True}} if self.request.deterministic else {}
            with self.room(), workspace(self.project, self._keeps_files, changed) as space:
                self.began = time.monotonic()
                late, too_long = self._train(night, self._with_data(night.turns), space)
            folder = str(space.project.root) if self._keeps_files() else None
        verifications = tuple(self._verification(name, night, late, too_long) for name in self.specs)
        if self.receipt is None:
            for verification in verifications:
                write_verification(self.project.state, verification)
            notify(self.project, *verifications)
        return Verified(verifications, self.references, folder)

    def _keeps_files(self) -> bool:
        return self.request.keep or self._is_bad()

    def _is_bad(self) -> bool:
        return any(row.is_bad for rows in self.verdicts.values() for row in rows)

    def _plan(self) -> Night:
        """Choose the runs, at least one of any rows unless a verdict is bad already."""
        past = read_verifications(self.project.state)
        rows = turns_of(self.accepted, past) if self.receipt is None else drawn_turns(self.accepted, past)
        turns = [
            replace(turn, seed=seed, dataset=self.specs[turn.name][turn.row].dataset)
            for turn in rows
            for seed in self.request.seeds or (turn.seed,)
        ]
        minutes, self.correction = self.request.budget_minutes, correction_of(past, self.num_parallel)
        budget = None if minutes is None else 60 * minutes
        night = plan_night(turns, self.request.share, budget, self.num_parallel, self.correction)
        if turns and not night.turns:
            problem = f"--budget {minutes:g}m: no row fits; the shortest needs about {math.ceil(night.least / 60)} minutes"
            if not self._is_bad():  # whose alarms are raised all the same
                raise ConfigError(problem)
            self.say(problem)
        elif turns:
            num_seeds = 1 if self.request.seeds else max(len(seeds) for rows in self.accepted.values() for seeds in rows.values())
            self.say(night.line(num_seeds if self.receipt is None else None))
        if self.receipt is not None and night.turns and not self.request.seeds:
            self.say(f"drawn at random: seed {', '.join(map(str, sorted({turn.seed for turn in night.turns})))}")
        return night

    def _with_data(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns whose dataset can be used; give verdicts on the others, except on those that another time will do."""
        problems = {dataset: self._problem(dataset) for dataset in dict.fromkeys(turn.dataset for turn in turns)}
        for turn in turns:
            if isinstance(problem := problems[turn.dataset], tuple):
                self._settle(turn.name, turn.row, *problem, seed=turn.seed)
        return [turn for turn in turns if problems[turn.dataset] is None]

    def _problem(self, dataset: str) -> tuple[Verdict, str] | str | None:
        """Prepare a dataset that is not prepared, or whose code alone differs, else verify its packed files.

        Return the verdict on its rows if they cannot be used, or who uses the present images if these could not be replaced.
        """
        who = ""
        try:
            if (self.project.packed(dataset) / INFO_FILE).is_file():
                if unchanged_dataset(self.project, dataset) is not None:
                    return None
                if not (changed := changed_datasets(self.project, self.params, [dataset])):
                    return None
                if not changed[dataset]:
                    what = f"{dataset} is not as it was packed: raw or packed files or settings differ"
                    has_raw = (self.project.root / self.params.datasets[dataset].raw).exists()
                    return Verdict.DRIFTED, f"{what}; run: dml reproduce{'' if has_raw else or_pull(self.project, dataset)}"
                who = users(self.project, dataset)
            self.say(f"preparing {dataset}")
            update_dataset(self.project, dataset)
        except DataError as error:
            if who:
                self.say(f"{dataset}: its rows are left for another time: {error}")
            return who or (Verdict.FAILED, str(error))
        return None

    def _train(self, night: Night, turns: Sequence[Turn], space: Workspace) -> tuple[list[Turn], list[Turn]]:
        """Train and judge the turns; return those that did not finish in the budget, and those of them that had all of it.

        After each group its verdicts are written, and bad ones reported: all rows may take days, and an interruption costs one group.
        """
        minutes = self.request.budget_minutes
        until = math.inf if minutes is None else self.began + 60 * minutes - END_SECONDS - COLLECT_SECONDS * len(turns)
        late = []
        groups = [sorted(group, key=lambda turn: list(self.specs[turn.name]).index(turn.row)) for group in groups_of(turns)]
        steps = [{f"{step}/{identity}" for turn in group for step, identity in self._identities(turn).items()} for group in groups]
        for place, group in enumerate(groups):
            specs = [self._spec(turn) for turn in group]
            seconds = predicted_seconds(group, self.num_parallel, self.correction) if place else 0.0  # the first is not left for ever
            fits = time.monotonic() + seconds < until
            failed = train(space, specs, until, self.say) if fits else {}
            is_stopped = not fits or time.monotonic() >= until
            for turn, spec in zip(group, specs, strict=True):
                outcome = failed.get((spec.label, spec.seed)) or self._collected(spec, space)
                if isinstance(outcome, Evidence):
                    self.verdicts[turn.name].append(self._judged(turn, outcome))
                elif outcome is None and is_stopped:
                    late.append(turn)
                else:
                    self._settle(turn.name, turn.row, Verdict.FAILED, outcome or "it did not finish", turn.seed)
            self._write(group, night, [*late, *(turn for other in groups[place + 1 :] for turn in other)])
            if not self._keeps_files():
                remove_steps(space, steps[place].difference(*steps[place + 1 :]))  # tables share runs
        return late, [turn for group in groups[:1] for turn in group[: self.num_parallel] if turn in late and self._has_begun(turn, space)]

    def _write(self, group: Sequence[Turn], night: Night, others: Sequence[Turn]) -> None:
        """Write the verification of a group's name so far, without the turns `others`, and raise the alarms of the group's rows."""
        if self.receipt is None:
            verification = self._verification(group[0].name, night, others, ())
            write_verification(self.project.state, verification)
            if any(row.is_bad and row.row in {turn.row for turn in group} for row in verification.rows):
                try:
                    notify(self.project, verification)
                except DmlError as error:  # raised again at the end, when all have been trained
                    self.say(str(error))

    def _identities(self, turn: Turn) -> dict[str, str]:
        spec = self._spec(turn)
        return step_identities(spec, read_dataset(self.project, spec.dataset))

    def _has_begun(self, turn: Turn, space: Workspace) -> bool:
        """Return whether workers have trained a run, finished or not: on a full cluster it may have waited for the whole budget."""
        identity = self._identities(turn)["train"]
        return (space.records / identity).is_file() or has_begun(space.project.state, "train", identity)

    def _spec(self, turn: Turn) -> RunSpec:
        return self.specs[turn.name][turn.row].model_copy(update={"seed": turn.seed})

    def _collected(self, spec: RunSpec, space: Workspace) -> Evidence | str | None:
        """Return the evidence of a run, None if it is not finished, or why its files cannot be used."""
        environment = environment_here(self.commit, self.params.scale)
        try:
            return collect(spec, read_dataset(self.project, spec.dataset), space.store, space.records, environment, self.say)
        except DmlError as error:
            return str(error)

    def _judged(self, turn: Turn, evidence: Evidence) -> RowVerdict:
        reference = self.references.get(turn.name)
        if reference is not None:
            return verdict_of(evidence, reference.of_row(turn.row), self.level)
        reason = "the finished run of this seed is not in the store"
        try:
            for finished in candidate_evidence(self.project, [self._spec(turn)], evidence.environment, self.say):
                difference = first_difference(finished, evidence)
                reason = "identical to the finished run" if difference is None else f"compared with the finished run: {difference}"
        except StoreError as error:  # damaged, or trained again meanwhile: the other rows' verdicts stay
            reason = f"not compared with the finished run: {error}"
        return RowVerdict(row=turn.row, seed=turn.seed, verdict=Verdict.NEW, reason=reason, evidence=evidence)

    def _verification(self, name: str, night: Night, late: Sequence[Turn], too_long: Sequence[Turn]) -> Verification:
        """Return the verification of a name; its seconds are its part of the whole duration, by the number of runs."""
        own = [turn for turn in night.turns if turn.name == name and turn not in late]
        part = len(own) / max(1, len(night.turns) - len(late))
        rows, places = self.verdicts[name], {row: place for place, row in enumerate(self.specs[name])}
        judged = {row.row for row in rows}
        long_rows = tuple(turn.row for turn in too_long if turn.name == name)
        never_begun = tuple(row for row in night.too_long if row in self.accepted[name])
        return Verification(
            name=name,
            started_at=self.started_at,
            seconds=round(part * (time.monotonic() - self.began), 3),
            commit=self.commit,
            rows=tuple(sorted(rows, key=lambda row: (places.get(row.row, -1), row.seed))),
            skipped=tuple(row for row in self.accepted[name] if row not in judged and row not in long_rows),
            too_long=never_begun + long_rows,
        )


def _with_resources(params: Params, names: Sequence[str]) -> Params:
    """Return the parameters, with the resources that the names request, if all are tables that request the same."""
    tables = {name: load_table(name) for name in names if name in table_names() and name not in params.comparison.datasets}
    return at_scale(params, tables) if len(tables) == len(names) and run_together(tables) == tables else params


def _rows_of(reference: Reference | None, specs: dict[str, RunSpec]) -> list[str]:
    """Return all rows of a name, those first that the project has."""
    accepted = [] if reference is None else [evidence.row for evidence in reference.evidence]
    return list(dict.fromkeys([*specs, *accepted]))
