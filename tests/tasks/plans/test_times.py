"""Estimated duration of a run: epochs times images over the measured rate, scaled by multiply-adds for another network."""

from pathlib import Path
from typing import Any

import pytest

from dml_core.data.store.split_config import ValidationConfig
from tasks.plans.times import RATES_FILE, Estimate, Rate, note_rate, placement_here, read_rates, step_estimate, total
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.tables.file import load_table
from tasks.tables.runs import runs_of
from tasks.workers.placement import Placement

COUNTS = {"train": 5_864, "test": 5_924}
TWO = Placement("cpu", 2, 1)


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    """SoftTriple on CUB-200-2011: BN-Inception on 224 pixels, 50 epochs."""
    return runs_of("softtriple/table1", load_table("softtriple/table1"))["cub200"][1]


def rate(**changes: object) -> Rate:
    known = {"step": "train", "backbone": "bn_inception", "crop_size": 224, "device": "cpu", "num_workers": 2, "images_per_second": 10.0}
    return Rate.model_validate(known | changes)


def test_the_measured_network(spec: RunSpec) -> None:
    assert step_estimate("train", spec, COUNTS, [rate()], TWO) == Estimate(50 * 5_864 / 10, "measured")
    assert step_estimate("embed", spec, COUNTS, [rate(), rate(step="embed", images_per_second=40)], TWO) == Estimate(5_924 / 40, "measured")


@pytest.mark.parametrize(
    ("role", "validation", "num_trained", "num_embedded"),
    [
        ("train", None, 60_000, 60_000),
        ("test", {"share": 0.2}, 48_000, 10_000),
        ("validation", {"share": 0.2}, 48_000, 12_000),
        ("validation", {"folds": 4, "fold": 0}, 45_000, 15_000),
        ("train", {"folds": 4, "fold": 0}, 45_000, 45_000),
    ],
)
def test_a_rate_counts_the_images_that_the_run_trains_on_and_scores(
    spec: RunSpec, tmp_path: Path, role: str, validation: dict[str, Any] | None, num_trained: int, num_embedded: int
) -> None:
    """Figures on training images embed these; held-out classes are not trained on. Their rates serve runs on test classes, too."""
    counts = {"train": 60_000, "test": 10_000}
    record = DatasetRecord(name="fashion_mnist", folder="", digest="", counts=counts, source="fashion_mnist")
    held_out = None if validation is None else ValidationConfig.model_validate(validation)
    run = spec.model_copy(
        update={
            "training": spec.training.model_copy(update={"validation": held_out}),
            "evaluation": spec.evaluation.model_copy(update={"role": role}),
        }
    )
    facts = {"device": "cpu", "num_workers": 2, "cost": {"wall_seconds": 100.0}}
    note_rate(tmp_path, "train", run, record, facts)
    note_rate(tmp_path, "embed", run, record, facts)
    rates = read_rates(tmp_path)
    assert [rate.images_per_second for rate in rates] == [50 * num_trained / 100, num_embedded / 100]
    assert step_estimate("embed", run, counts, rates, TWO).seconds == 100
    assert step_estimate("embed", spec, counts, rates, TWO).seconds == pytest.approx(100 * 10_000 / num_embedded)
    assert step_estimate("train", spec, counts, rates, TWO).seconds == pytest.approx(100 * 60_000 / num_trained)


def test_the_nearest_network_that_was_measured(spec: RunSpec) -> None:
    vgg, resnet = rate(backbone="vgg16"), rate(backbone="resnet50", crop_size=112)
    found = step_estimate("train", spec, COUNTS, [vgg, resnet], TWO)  # resnet50 at 112 pixels is half of BN-Inception at 224
    assert found.seconds == pytest.approx(50 * 5_864 / 10 * (2.0 * 224**2) / (4.1 * 112**2))
    assert found.basis == "from resnet50 at 112 pixels"
    alone = step_estimate("train", spec, COUNTS, [rate(num_workers=1)], TWO)
    assert alone == Estimate(50 * 5_864 / 10, "from bn_inception at 224 pixels with 1 worker")


def test_a_shared_gpu_has_rates_of_its_own(spec: RunSpec, tmp_path: Path) -> None:
    """Eighteen runs that share a GPU are each many times slower than one alone."""
    record = DatasetRecord(name="cub200", folder="", digest="", counts=COUNTS, source="cub200")
    for seconds, runs_per_gpu in ((1_000.0, 1), (9_000.0, 18)):
        facts = {"device": "cuda", "num_workers": 1, "num_sharing": runs_per_gpu, "cost": {"wall_seconds": seconds}}
        note_rate(tmp_path, "train", spec, record, facts)
    rates = read_rates(tmp_path)
    alone, shared = (Placement("cuda", 1, runs_per_gpu, runs_per_gpu=runs_per_gpu) for runs_per_gpu in (1, 18))
    assert step_estimate("train", spec, COUNTS, rates, alone) == Estimate(pytest.approx(1_000, rel=1e-3), "measured")
    assert step_estimate("train", spec, COUNTS, rates, shared) == Estimate(pytest.approx(9_000, rel=1e-3), "measured")
    assert step_estimate("train", spec, COUNTS, rates[1:], alone).basis == "from bn_inception at 224 pixels, 18 runs a GPU"
    assert step_estimate("train", spec, COUNTS, rates[:1], shared).basis == "from bn_inception at 224 pixels, 1 run a GPU"


def test_runs_that_share_the_cores_have_rates_of_their_own(spec: RunSpec, tmp_path: Path) -> None:
    """A single run with all cores replaced the rate of eight at a time, and the plan of eight was a seventh of their time."""
    record = DatasetRecord(name="cub200", folder="", digest="", counts=COUNTS, source="cub200")
    for seconds, num_sharing in ((8_000.0, 8), (1_000.0, 1)):
        facts = {"device": "cpu", "num_workers": 1, "num_sharing": num_sharing, "cost": {"wall_seconds": seconds}}
        note_rate(tmp_path, "train", spec, record, facts)
    rates = read_rates(tmp_path)
    eight, alone = Placement("cpu", 1, 8), Placement("cpu", 1, 1)
    assert step_estimate("train", spec, COUNTS, rates, eight) == Estimate(pytest.approx(8_000, rel=1e-3), "measured")
    assert step_estimate("train", spec, COUNTS, rates, alone) == Estimate(pytest.approx(1_000, rel=1e-3), "measured")
    assert step_estimate("train", spec, COUNTS, rates[1:], eight).basis == "from bn_inception at 224 pixels, 1 run at a time"


@pytest.mark.parametrize(
    ("device", "setting", "values", "others"),
    [
        ("cpu", "recall_every_epochs", (1, None), ("null", "1")),
        ("cuda", "precision", ("float32", "auto"), ("bfloat16", "float32")),
    ],
)
def test_trainings_with_other_precision_or_curve_have_rates_of_their_own(
    spec: RunSpec, tmp_path: Path, device: str, setting: str, values: tuple[object, ...], others: tuple[str, ...]
) -> None:
    """A curve of every epoch took 1.5 times as long in a plan without, and the last rate replaced the other."""
    record = DatasetRecord(name="cub200", folder="", digest="", counts=COUNTS, source="cub200")
    runs = [spec.model_copy(update={"training": spec.training.model_copy(update={setting: value})}) for value in values]
    facts = [{"device": device, "num_workers": 1, "cost": {"wall_seconds": seconds}} for seconds in (3_000.0, 1_000.0)]
    for run, of_run in zip(runs, facts, strict=True):
        note_rate(tmp_path, "train", run, record, of_run)
        note_rate(tmp_path, "embed", run, record, of_run)
    rates, here = read_rates(tmp_path), Placement(device, 1, 1)
    assert [rate.step for rate in rates].count("embed") == 1
    for run, seconds, other in zip(runs, (3_000, 1_000), others, strict=True):
        assert step_estimate("train", run, COUNTS, rates, here) == Estimate(pytest.approx(seconds, rel=1e-3), "measured")
        of_other = [rate for rate in rates if rate.step == "train" and rate != rates[0 if seconds == 3_000 else 2]]
        assert step_estimate("train", run, COUNTS, of_other, here).basis == f"from bn_inception at 224 pixels, {setting} {other}"


def test_a_rate_of_a_shared_gpu_in_an_older_file_is_read() -> None:
    assert rate(device="cuda", runs_per_gpu=18).num_sharing == 18


def test_a_frozen_network_takes_the_time_of_its_embedding_also_where_no_training_was_measured(spec: RunSpec) -> None:
    """The whole table had no estimate."""
    frozen = spec.model_copy(update={"training": spec.training.model_copy(update={"num_epochs": 0})})
    rates = [rate(step="embed", images_per_second=40)]
    estimate = total([step_estimate("train", frozen, COUNTS, rates, TWO), step_estimate("embed", frozen, COUNTS, rates, TWO)])
    assert estimate == Estimate(5_924 / 40, "measured")
    assert estimate.cost is not None


@pytest.mark.parametrize("other", [rate(device="cuda"), rate(step="embed"), rate(backbone="small_cnn", crop_size=48)])
def test_what_says_nothing_of_it(spec: RunSpec, other: Rate) -> None:
    assert step_estimate("train", spec, COUNTS, [other], TWO) == Estimate(None, "no time estimate (not measured here)")
    assert step_estimate("train", spec, {}, [rate()], TWO).seconds is None


def test_a_sum_is_unknown_where_one_is() -> None:
    assert total([]) == Estimate(0, "measured")
    assert total([Estimate(1, "measured"), Estimate(2, "from x")]) == Estimate(3, "from x")
    assert total([Estimate(1, "measured"), Estimate(None, "no time estimate (not measured here)")]) == Estimate(
        None, "no time estimate (not measured here)"
    )


def test_runs_in_parallel_take_no_less_than_the_longest() -> None:
    short, long = Estimate(20.0, "measured"), Estimate(80.0, "measured")
    assert total([long], 4).seconds == 80, "one run does not end sooner beside three idle devices"
    assert total([long, short], 4).seconds == 80
    assert total([long] * 8, 4).seconds == 160
    assert total([long, Estimate(None, "no time estimate (not measured here)")], 4).seconds is None


def test_rates_are_kept_and_the_last_of_a_kind_counts(spec: RunSpec, tmp_path: Path) -> None:
    record = DatasetRecord(name="cub200", folder="", digest="", counts=COUNTS, source="cub200")

    def facts(images_per_second: float) -> dict[str, Any]:
        seconds = spec.training.num_epochs * COUNTS["train"] / images_per_second
        return {
            "device": "cpu",
            "num_workers": 2,
            "cost": {"wall_seconds": seconds + 7, "lost_seconds": 7, "cpu_seconds": 2 * (seconds + 7)},
        }

    for images_per_second in (5.0, 10.0):
        note_rate(tmp_path, "train", spec, record, facts(images_per_second))
    note_rate(tmp_path, "train", spec, record.model_copy(update={"counts": {"train": 16, "test": 16}}), facts(1.0))  # a smoke run
    with (tmp_path / RATES_FILE).open("a") as file:
        file.write('{"step": "tra')
    assert read_rates(tmp_path) == [rate(cores=2.0, precision="float32", recall_every_epochs=0)]
    assert read_rates(tmp_path / "nowhere") == []


def test_where_runs_would_train() -> None:
    here = placement_here(ScaleSpec(num_workers=1, device="cpu"))
    assert (here.device, here.num_workers, here.num_groups) == ("cpu", 1, 1)
    assert placement_here(ScaleSpec(device="cuda")).device == "cuda"


@pytest.mark.parametrize(("runs_per_gpu", "part"), [(1, 1.0), (4, 0.25)])
def test_a_planned_run_counts_its_part_of_a_gpu(spec: RunSpec, runs_per_gpu: int, part: float) -> None:
    placement = Placement("cuda", 1, runs_per_gpu, runs_per_gpu=runs_per_gpu)
    estimate = step_estimate("train", spec, COUNTS, [rate(device="cuda", num_workers=1)], placement)
    assert estimate.seconds is not None
    assert estimate.cost is not None
    assert estimate.cost.gpu_seconds == pytest.approx(part * estimate.seconds)
