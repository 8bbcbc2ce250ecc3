"""Records of a verification: evidence of one trained run, accepted references, verdicts of rows.

Evidence states what went into a run and what came out, so that two runs can be compared at the step where they part. All hashes are SHA-256
in hexadecimal. Fields that a newer program added are kept.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AwareDatetime, Field, model_validator

from dml_core.evaluation.metric_info import recall_k
from tasks.runs.records import Record
from tasks.tables.alarms import NO_VERDICT

FORMAT = 1
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Environment(Record):
    """The surroundings that may change a result although parameters and data are the same; on a cluster those of the run's first worker.

    Attributes:
        commit: commit of the project, with "-dirty" if code or settings differ (`tasks.git.code_commit`).
        packages: versions of the installed libraries that compute (torch, torchvision, numpy, faiss, pillow and others).
        processor: model of the processor, and the instruction sets and kernels that torch and NumPy use.
        device: "cpu", or name of the GPU with its driver.
        threads: threads of one worker.
        deterministic: whether torch's deterministic algorithms were used.
        workers: processes that trained the run; 1 in files from before it was recorded.
    """

    commit: str
    python: str
    packages: dict[str, str]
    processor: str
    device: str
    threads: int
    deterministic: bool = False
    workers: int = 1


class Evidence(Record):
    """One trained and scored run.

    Attributes:
        row: name of the row: `DATASET/VARIANT` of the standing comparison, or `TABLE:ROW:DATASET` of a table.
        settings: hash of the settings of training, embedding and scoring.
        dataset: digest of the dataset's content.
        initial_weights: hash of the network and loss before the first step.
        batches: hash of the samples of the first epoch's batches, in order.
        losses: loss of each step, exact as float32; in a verification's file, of a run that is not bad, see `shortened`.
        weights: hash of the trained weights.
        scores: each metric of the evaluation, exact.
        curve: validation or training Recall@1 by epoch where the run records it, for the epochs that a score needs; else empty.
        seconds: wall-clock time of training.
        pixels: hash of the first batch's views as the network gets them; None for a run without a step.
        steps_per_epoch: number of steps of an epoch; 0 for a run without a step.
        curve_epochs: number of completed epochs at each value of `curve`.
        flow: surroundings of the flow, which computed hashes and scores, if workers of a cluster trained; else those of `environment`.
    """

    row: str
    seed: int
    settings: Hash
    dataset: str
    initial_weights: Hash
    batches: Hash
    losses: tuple[float, ...]
    weights: Hash
    scores: dict[str, float]
    curve: tuple[float, ...] = ()
    seconds: float
    environment: Environment
    pixels: Hash | None = None
    steps_per_epoch: int = 0
    curve_epochs: tuple[int, ...] = ()
    flow: Environment | None = None

    @model_validator(mode="after")
    def _has_an_epoch_for_each_point(self) -> Self:
        if len(self.curve) != len(self.curve_epochs):
            raise ValueError(f"curve has {len(self.curve)} values, curve_epochs {len(self.curve_epochs)}")
        return self

    @property
    def first_recall(self) -> str | None:
        """Name of the score Recall@K with the smallest K; None if there is none."""
        ks = [k for name in self.scores if (k := recall_k(name)) is not None]
        return f"recall@{min(ks)}" if ks else None

    def shortened(self) -> Self:
        """Return it with the losses of the first and the last epoch alone, which are judged: a night's file need not have a million."""
        num_steps = self.steps_per_epoch
        if not 0 < 2 * num_steps < len(self.losses):
            return self
        return self.model_copy(update={"losses": self.losses[:num_steps] + self.losses[-num_steps:]})


class Acceptance(Record):
    """Acceptance of a reference's rows (by whom, why, when), before others of its rows were accepted again; fields as in `Reference`."""

    rows: tuple[str, ...]
    who: str
    why: str
    commit: str
    accepted_at: AwareDatetime


class Reference(Record):
    """Accepted evidence of all rows of a table or of a dataset's standing comparison, a committed file.

    Attributes:
        name: table, or dataset of the standing comparison.
        protocol: hash of the protocol's settings without seeds; references of two protocols are never compared.
        who: name and address of the person who accepted it, from git's configuration.
        why: their reason.
        earlier: of rows that were accepted before, oldest first.
    """

    format: int = FORMAT
    name: str
    protocol: Hash
    who: str
    why: str
    commit: str
    accepted_at: AwareDatetime
    evidence: tuple[Evidence, ...] = Field(min_length=1)
    earlier: tuple[Acceptance, ...] = ()

    def of_row(self, row: str) -> list[Evidence]:
        """Return the accepted runs of a row."""
        return [evidence for evidence in self.evidence if evidence.row == row]


class Receipt(Reference):
    """Finished and verified runs of one project, for others to reproduce: what `accept` would make the reference.

    Attributes:
        lock: hash of the project's requirements.lock; None if it has none.
    """

    lock: Hash | None = None  # of the project's requirements.lock


class Verdict(StrEnum):
    """Result of verifying a row; those of `BAD` raise an alarm."""

    IDENTICAL = "identical"
    WITHIN_BAND = "within the band"
    DRIFTED = "drifted"
    FAILED = "failed"
    VANISHED = "vanished"
    NEW = NO_VERDICT


BAD = (Verdict.DRIFTED, Verdict.FAILED, Verdict.VANISHED)  # verdicts that raise an alarm
REPRODUCED = (Verdict.IDENTICAL, Verdict.WITHIN_BAND)


class Band(Record):
    """Limits of one score of one run, its level corrected for the number of rows and nights; two one-sided limits."""

    low: float
    high: float


class RowVerdict(Record):
    """Verdict of one run of one row.

    Attributes:
        reason: one sentence: the first difference between the two runs, or the score that left its band.
        changed: what differs in the environments, as "torch 2.11.0 -> 2.14.1".
        bands: limits of each judged score; scores that are not judged have none.
        evidence: the new run; None if it failed or vanished.
    """

    row: str
    seed: int
    verdict: Verdict
    reason: str
    changed: tuple[str, ...] = ()
    bands: dict[str, Band] = {}
    evidence: Evidence | None = None

    @property
    def is_bad(self) -> bool:
        """True if it raises an alarm."""
        return self.verdict in BAD

    @property
    def recall(self) -> str:
        """The first Recall@K in per cent; empty without a run."""
        name = None if self.evidence is None else self.evidence.first_recall
        return "" if self.evidence is None or name is None else f"{100 * self.evidence.scores[name]:.1f}"

    @property
    def recall_band(self) -> str:
        """The band of the first Recall@K in per cent; empty if the run was not judged by one."""
        band = None if self.evidence is None else self.bands.get(self.evidence.first_recall or "")
        return "" if band is None else f"{100 * band.low:.1f} to {100 * band.high:.1f}"


class Verification(Record):
    """One execution of `dml verify`: a night's share of the rows, or all.

    Attributes:
        name: table, or dataset of the standing comparison.
        skipped: rows left for another night by the share or the budget, or as a flow uses their dataset, whose images it must not replace.
        too_long: rows longer than the budget: by prediction, then also in `skipped`; or they began first and were not finished at its end.
    """

    format: int = FORMAT
    name: str
    started_at: AwareDatetime
    seconds: float
    commit: str
    rows: tuple[RowVerdict, ...]
    skipped: tuple[str, ...] = ()
    too_long: tuple[str, ...] = ()

    @property
    def trained(self) -> list[Evidence]:
        """The runs that were trained to their end."""
        return [row.evidence for row in self.rows if row.evidence is not None]
