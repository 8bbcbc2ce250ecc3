"""Settings stated by the papers and their released code, row by row, where the catalogue once differed (both are named in the files)."""

from typing import Any

import pytest

from dml_core.errors import ConfigError
from dml_core.training.config import TrainingConfig
from tasks.runs.protocols import load_protocol
from tasks.tables.file import load_table, paper_tables
from tasks.tables.runs import row_training, runs_of, scoring_of

DIGITS = ("mnist", "fashion_mnist")


def training(table: str, row: str, dataset: str, variant: str) -> TrainingConfig:
    return row_training(table, load_table(table).rows[row], dataset, variant)


def claims(table: str) -> set[tuple[str, str, Any]]:
    return {(claim.row, claim.metric, claim.reference) for claim in load_table(table).claims}


# ---------------------------------------------------------------- heated-up softmax


@pytest.mark.parametrize("dataset", DIGITS)
@pytest.mark.parametrize(("table", "row", "alpha"), [
    ("figure3", "panel-a", 0.25), ("figure3", "panel-b", 4), ("figure3", "panel-c", 16), ("figure3", "panel-d", 64),
    ("figure3", "heated", 16), ("figure4", "figure-3-b", 4),
])  # fmt: skip
def test_digits_train_as_run_mnist_lenet_does(table: str, row: str, alpha: float, dataset: str) -> None:
    found = training(f"heated_up_softmax/{table}", row, dataset, load_table(f"heated_up_softmax/{table}").rows[row].variants[0])
    options = found.loss.options
    assert options["alpha"] == alpha
    assert (options["bias"], options["bias_inside_alpha"], options["initial"]) == (True, False, "unit_norm")
    assert options["heated_alpha"] == (4 if row == "heated" else None)
    assert round(options["heat_from"] * found.num_epochs) == found.num_epochs - 19 == 81
    assert (found.sampler.batch_size, found.sampler.drop_last) == (128, True)
    optimiser = found.optimiser
    assert (optimiser.name, optimiser.learning_rate, optimiser.eps, optimiser.weight_decay) == ("adam", 1e-3, 1e-8, 0)
    assert optimiser.eps_before_bias_correction, "TensorFlow's"
    assert (found.model.backbone.name, found.model.head.embedding_dim) == ("lenet_released", 2)
    assert 55_000 // found.sampler.batch_size * found.num_epochs == 42_900  # the steps of the release


def test_the_plain_classifier_of_figure_4_has_the_bias_that_the_released_layer_always_adds() -> None:
    table = load_table("heated_up_softmax/figure4")
    plain = [row for row in table.rows.values() if row.loss is not None]
    assert len(plain) == 4
    assert {(row.loss["name"], row.loss["options"]["bias"]) for row in plain if row.loss} == {("softmax", True)}


def test_every_sop_row_as_released_starts_at_the_class_means_and_clusters_once() -> None:
    """run_Inception.py passes --better_init and --fast_kmeans for all of them, including plain softmax."""
    name = "heated_up_softmax/table3"
    table = load_table(name)
    rows = [key for key, row in table.rows.items() if row.is_run]
    assert len(rows) == 5
    for variant, starts in (("as_released", True), ("as_published", False)):
        assert {training(name, row, "sop", variant).loss.options.get("better_init", False) for row in rows} == {starts}, variant
    kmeans = {
        other: scoring_of(other, load_table(other), load_table(other).datasets[0]).kmeans for other in (name, "heated_up_softmax/table1")
    }
    assert [(found.num_runs, found.num_iterations) for found in kmeans.values()] == [(1, 300), (10, 300)]


def test_released_crops_leave_out_the_last_offset() -> None:
    protocol = load_protocol("heated_up_softmax")
    crops = {
        (data, variant): protocol.training_config(data, variant).transform.crop
        for data in protocol.datasets
        for variant in protocol.variants
    }
    photographs = {data for data, _ in crops} - set(DIGITS)
    assert {crops[data, "as_released"] for data in photographs} == {"random_exclusive"}
    assert {crops[data, "as_published"] for data in photographs} == {"random"}
    assert {crops[data, variant] for data, variant in crops if data in DIGITS} == {"none"}


# ---------------------------------------------------------------- SGSL


@pytest.mark.parametrize(("variant", "smoothing", "dropout"), [
    ("as_published", {"cub200": 0.1, "cars196": 0.1, "inshop": 0.1}, 0.5),
    ("as_released", {"cub200": 0.4, "cars196": 0.4, "inshop": 0.1}, 0),
])  # fmt: skip
def test_all_rows_of_sgsl_s_table_3_share_their_settings(variant: str, smoothing: dict[str, float], dropout: float) -> None:
    name = "sgsl/table3"
    table = load_table(name)
    for key, row in table.rows.items():
        for dataset in table.datasets if row.is_run else ():
            found = row_training(name, row, dataset, variant).loss
            options = found.options["terms"][0]["options"] if found.name == "combined" else found.options
            assert (options["label_smoothing"], options.get("dropout", 0)) == (smoothing[dataset], dropout), (key, dataset)


def test_released_figures_stand_at_every_k_that_the_logs_have() -> None:
    for name in ("sgsl/table1", "sgsl/table2", "sgsl/table3"):
        table = load_table(name)
        released = table.rows["sgsl-2048"].released
        assert released is not None
        missing = {column.dataset for column, value in zip(table.flat_columns, released, strict=True) if value is None}
        assert missing <= {"cars196"}, "eight logs, maybe of several systems: they stand in the note"


# ---------------------------------------------------------------- claims and figures that no paper has


def test_claims_are_those_of_the_papers() -> None:
    assert not any(metric == "map_csc" for _, metric, _ in claims("sgsl/figure3"))
    assert {metric for _, metric, _ in claims("sgsl/table5")} == {"csc"}
    assert claims("discriminative/table3") == set()
    assert claims("tuplet_margin/table2") == set()
    for number in (1, 2, 3, 4):
        assert ("bn", "recall@1", "ln") in claims(f"heated_up_softmax/table{number}")  # section 4.3
    table5 = claims("heated_up_softmax/table5")  # section 4.4
    for size in (64, 128, 256):
        others = {f"{column}-{size}" for column in ("sm", "alpha-4", "alpha-8", "alpha-16", "alpha-32", "alpha-64")}
        assert {reference for row, _, reference in table5 if row == f"hbn-{size}"} == others
        assert {reference for row, _, reference in table5 if row == f"alpha-16-{size}"} == others - {f"sm-{size}", f"alpha-16-{size}"}


def test_discriminative_clusters_as_scikit_learn_did_then() -> None:
    for name in paper_tables():
        if name.startswith("discriminative/"):
            table = load_table(name)
            kmeans = scoring_of(name, table, table.datasets[0]).kmeans
            assert (kmeans.num_runs, kmeans.num_iterations) == (10, 300), name


@pytest.mark.parametrize("key", ["recall_at", "clustering", "role", "epoch"])
def test_scoring_that_the_columns_decide_is_refused_in_a_table(key: str) -> None:
    name = "heated_up_softmax/table3"
    table = load_table(name)
    own = table.model_copy(update={"evaluation": {**table.evaluation, key: None}})
    with pytest.raises(ConfigError, match=f"{name}: evaluation.{key} has no effect: the table's columns, role and epochs decide it"):
        scoring_of(name, own, table.datasets[0])


def test_rows_on_training_images_that_hold_out_different_classes_are_refused() -> None:
    name = "project/claims"
    table = load_table(name)
    row, *others = (row.model_copy(update={"role": None, "runs_on": ()}) for row in table.rows.values() if row.is_run)
    split = row.model_copy(update={"training": {**row.training, "validation": {"share": 0.2}}})
    rows = {"one": split, **{f"other-{number}": other for number, other in enumerate(others)}}
    runs_of(name, table.model_copy(update={"rows": rows}))
    with pytest.raises(ConfigError, match=f"{name}: .*: '.+' and '.+' hold out different classes"):
        runs_of(name, table.model_copy(update={"rows": rows, "role": "train"}))


# ---------------------------------------------------------------- SoftTriple


@pytest.mark.parametrize(("variant", "eps", "is_before"), [("as_released", 0.01, True), ("as_published", 1e-8, False)])
def test_softtriple_s_adam_is_that_of_pytorch_1_1_as_released(variant: str, eps: float, is_before: bool) -> None:
    """Its README requires PyTorch 1.1, which added eps before the bias correction; the first steps are shorter."""
    for table in (name for name in paper_tables() if name.startswith("softtriple/")):
        for name, row in load_table(table).rows.items():
            if row.is_run:
                optimiser = training(table, name, load_table(table).datasets[0], variant).optimiser
                assert (optimiser.name, optimiser.eps, optimiser.eps_before_bias_correction) == ("adam", eps, is_before)
