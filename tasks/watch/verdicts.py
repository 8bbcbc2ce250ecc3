"""Compare a new run with the accepted runs of its row: the first difference, what differs in the environments, and the verdict.

| verdict | condition |
|---|---|
| identical | all bits, losses and scores equal those of the accepted run with the same seed; a digest of another packing is noted |
| drifted | settings or dataset differ; or a score is outside its band; or bits differ in an equal environment |
| within the band | bits differ in another environment, and every judged score is within its band |

Environments are equal if they differ at most in the commit. On CPUs such runs have equal bits, so a difference is a fault, or a change of
the code that a person has to accept, even if scores are within their bands: a band has room for faults. On GPUs sums have no fixed order;
there only what enters the network must be equal (initial weights, batches, views of images). Workers and threads do not change that, which
is computed in one thread of the flow.
"""

from collections.abc import Sequence

from tasks.watch.bands import judge, seeds_needed
from tasks.watch.records import Band, Environment, Evidence, RowVerdict, Verdict
from tasks.wording import counted

INPUTS = {  # compared in this order, after settings and dataset
    "initial_weights": "the initial weights differ",
    "batches": "samples, labels or order of the first epoch's batches differ",
    "pixels": "the images of the first batch differ as the network gets them",
}
SCORING = "scoring differs, of equal weights"


def verdict_of(new: Evidence, accepted: Sequence[Evidence], level: float) -> RowVerdict:
    """Return the verdict of a new run, by the accepted runs of its row, at least one; `level` as of `tasks.watch.bands.shared_level`."""
    same = next((evidence for evidence in accepted if evidence.seed == new.seed), None)
    nearest = same or accepted[0]
    changed = differing(nearest.environment, new.environment)
    changed += tuple(f"flow's {line}" for line in differing(_flow(nearest), _flow(new)) if line not in changed)

    def result(verdict: Verdict, reason: str, bands: dict[str, Band] | None = None) -> RowVerdict:
        return RowVerdict(row=new.row, seed=new.seed, verdict=verdict, reason=reason, changed=changed, bands=bands or {}, evidence=new)

    if nearest.settings != new.settings:
        return result(Verdict.DRIFTED, "the settings differ from the accepted run's")
    difference = f"seed {new.seed} has no accepted run" if same is None else first_difference(same, new)
    if difference is None:
        digest = "the dataset's digest differs (another packing, or images that no score shows)"
        return result(Verdict.IDENTICAL, "" if nearest.dataset == new.dataset else digest)
    if nearest.dataset != new.dataset:
        return result(Verdict.DRIFTED, "the dataset's content differs from the accepted run's")
    bands, outside = judge(new, accepted, level)
    if outside is not None:
        return result(Verdict.DRIFTED, f"{outside}; {difference}", bands=bands)
    is_exact = new.environment.device == "cpu" or difference in INPUTS.values()  # equal bits are expected
    if same is not None and is_exact and _is_of_equal_environments(difference, same, new):
        scores = "; all judged scores are within their bands" if bands else ""
        return result(Verdict.DRIFTED, f"{difference}, in an equal environment{scores}", bands=bands)
    if not bands:
        few = f"{counted(len(accepted), 'accepted seed')}, and a band needs {seeds_needed(level)}"
        return result(Verdict.DRIFTED, f"{difference}; {few}")
    return result(Verdict.WITHIN_BAND, difference, bands=bands)


def first_difference(accepted: Evidence, new: Evidence) -> str | None:
    """Return the first difference of two runs of one row and seed in the order in which they arise, in words; None if there is none."""
    for name, what in INPUTS.items():
        old, now = getattr(accepted, name), getattr(new, name)
        if old is not None and now is not None and old != now:
            return what
    step = next((step for step, pair in enumerate(zip(accepted.losses, new.losses, strict=False)) if pair[0] != pair[1]), None)
    if step is not None:
        return f"the loss differs from {_step(step, new)} on: {_change(accepted.losses[step], new.losses[step])}"
    if len(accepted.losses) != len(new.losses):
        return f"the number of steps differs: {len(accepted.losses)} -> {len(new.losses)}"
    if accepted.weights != new.weights:
        return "the trained weights differ, although all losses are equal"
    for name in sorted(accepted.scores.keys() | new.scores.keys()):
        old_score, score = accepted.scores.get(name), new.scores.get(name)
        if old_score != score:
            return f"{SCORING}: {name} {_change(old_score, score)}"
    return None


def differing(accepted: Environment, new: Environment) -> tuple[str, ...]:
    """Return what differs in two environments, as "torch 2.11.0 -> 2.14.1"."""
    pairs = {
        name: (getattr(accepted, name), getattr(new, name))
        for name in ("commit", "python", "processor", "device", "threads", "deterministic", "workers")
    } | {name: (accepted.packages.get(name), new.packages.get(name)) for name in sorted(accepted.packages.keys() | new.packages.keys())}
    return tuple(f"{name} {_short(old)} -> {_short(now)}" for name, (old, now) in pairs.items() if old != now)


def is_equal(accepted: Environment, new: Environment, *fields: str) -> bool:
    """Return whether two environments differ at most in the commit and in these fields."""
    return all(getattr(accepted, name) == getattr(new, name) for name in Environment.model_fields.keys() - {"commit", *fields})


def _is_of_equal_environments(difference: str, accepted: Evidence, new: Evidence) -> bool:
    """Return whether equal environments computed what differs: the flows inputs and, of what workers trained, scores; workers the rest."""
    if difference in INPUTS.values():
        return is_equal(_flow(accepted), _flow(new), "workers", "threads")
    is_flow_equal = is_equal(_flow(accepted), _flow(new)) or not difference.startswith(SCORING)
    return is_flow_equal and is_equal(accepted.environment, new.environment)


def _flow(evidence: Evidence) -> Environment:
    return evidence.flow or evidence.environment


def _step(step: int, evidence: Evidence) -> str:
    num_steps = evidence.steps_per_epoch
    if not num_steps:
        return f"step {step + 1}"
    # Shortened evidence has the first and the last epoch alone, and looks like that of a run of two epochs.
    is_last = num_steps <= step and len(evidence.losses) == 2 * num_steps
    return f"step {step % num_steps + 1} of {'the last epoch' if is_last else f'epoch {step // num_steps + 1}'}"


def _change(old: float | None, new: float | None) -> str:
    """Return both numbers, with all digits if the first nine are the same."""
    short, whole = (["none" if score is None else f"{score:{form}}" for score in (old, new)] for form in (".9g", ".17g"))
    return " -> ".join(short if short[0] != short[1] else whole)


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    commit, dash, dirty = text.partition("-dirty")
    return f"{commit[:10]}{dash}{dirty}" if len(commit) == 40 else text
