"""The project's datasets on which a table runs: split as the table requires, or refused in one line."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dml_core.errors import ConfigError
from tasks.data import read_packed
from tasks.environment import Project
from tasks.plans.needs import check_tables
from tasks.runs.params.file import load_params
from tasks.runs.specs import DatasetSpec, Params
from tasks.tables import file
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.runs import chosen_runs, named_dataset, not_in_params, runs_of, scoring_of
from tasks.tables.smoke import draw_for_smoke

ROOT = Path(__file__).parents[3]
BY_IMAGE = {"split": "images"}
BY_CLASS, SPLIT = DatasetSpec(reader="mnist", raw="a"), DatasetSpec(reader="mnist", raw="b", options=BY_IMAGE)
FIGURES = ("heated_up_softmax/figure2", "heated_up_softmax/figure3", "heated_up_softmax/figure4", "sgsl/figure3")


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "params.yaml")


def having(params: Params, **datasets: DatasetSpec) -> Params:
    return params.model_copy(update={"datasets": datasets})


@pytest.mark.parametrize(("options", "found"), [({}, "digits"), (BY_IMAGE, "split")])
def test_the_one_that_is_split_as_the_table_asks(options: dict[str, Any], found: str, params: Params) -> None:
    assert named_dataset(having(params, digits=BY_CLASS, split=SPLIT), "mnist", options) == found


def test_the_project_s_own_fashion_mnist_is_there_in_both_splits(params: Params) -> None:
    assert named_dataset(params, "fashion_mnist", {}) == "fashion-mnist"
    for name in FIGURES:
        assert named_dataset(params, "fashion_mnist", load_table(name).dataset_options("fashion_mnist")) == "fashion-mnist-by-image"


@pytest.mark.parametrize(
    ("datasets", "options", "said"),
    [
        (
            {"digits": BY_CLASS},
            BY_IMAGE,
            "dataset 'mnist' (split: images) is not in params.yaml; add below datasets: "
            "mnist-by-image: {reader: mnist, raw: data/raw/mnist-by-image, options: {split: images}}",
        ),
        ({"split": SPLIT}, {}, "dataset 'mnist' is not in params.yaml; add below datasets: mnist: {reader: mnist, raw: data/raw/mnist}"),
        ({"split": SPLIT}, {**BY_IMAGE, "num_train_images": 50_000}, "dataset 'mnist' (split: images, num_train_images: 50000) is not in"),
    ],
)
def test_another_split_is_none_and_what_to_add_is_one_line(
    datasets: dict[str, DatasetSpec], options: dict[str, Any], said: str, params: Params
) -> None:
    assert named_dataset(having(params, **datasets), "mnist", options) is None
    assert not_in_params({"mnist": options}).startswith(said)
    assert "\n" not in not_in_params({"mnist": options})


def test_two_that_fit_are_refused(params: Params) -> None:
    with pytest.raises(ConfigError, match="datasets one, two are all read by 'mnist'; rename the tables' one to 'mnist'"):
        named_dataset(having(params, one=SPLIT, two=SPLIT), "mnist", BY_IMAGE)


def test_a_class_disjoint_dataset_is_refused_for_a_figure_on_all_digits(params: Params) -> None:
    by_class_only = having(params, digits=BY_CLASS, clothes=DatasetSpec(reader="fashion_mnist", raw="c"))
    chosen = chosen_runs(by_class_only, [FIGURES[1]], Choice())
    assert chosen.missing == {"mnist": BY_IMAGE, "fashion_mnist": BY_IMAGE}
    with pytest.raises(ConfigError, match=r"'fashion_mnist' \(split: images\) are not in params.yaml"):
        check_tables(Project(ROOT, ROOT, "", ""), by_class_only, chosen, Choice())


def test_gradients_are_of_training_images_and_maps_of_test_images() -> None:
    roles = {name: {spec.row: spec.evaluation.role for spec in runs_of(name, load_table(name))["fashion_mnist"]} for name in FIGURES}
    assert set(roles["heated_up_softmax/figure2"].values()) == {"train"}
    assert set(roles["heated_up_softmax/figure3"].values()) == set(roles["sgsl/figure3"].values()) == {"test"}
    assert roles["heated_up_softmax/figure4"] == {
        "panel-a": "test",
        "panel-b": "test",
        "panel-c": "train",
        "panel-d": "train",
        "figure-3-b": "test",
    }


def test_panels_of_one_classifier_are_one_training() -> None:
    runs = {spec.row: spec.training for spec in runs_of(FIGURES[2], load_table(FIGURES[2]))["mnist"]}
    assert runs["panel-a"] == runs["panel-b"] == runs["panel-c"] == runs["panel-d"] != runs["figure-3-b"]
    (three_b,) = [spec for spec in runs_of(FIGURES[1], load_table(FIGURES[1]))["mnist"] if spec.row.startswith("panel-b")]
    assert three_b.training == runs["figure-3-b"]


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_a_smoke_run_draws_digits_that_train_and_test_share(dataset: str, tmp_path: Path) -> None:
    folder = draw_for_smoke(Project(tmp_path, tmp_path / "state", "", ""), dataset)
    assert read_packed(folder, dataset).counts == {"train": 16, "test": 16}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_distance:", "max_dist:", "softtriple/figure9: with-regulariser: measurements 'unique_centres': unknown key 'max_dist'"),
        ("[num_unique_centres]", "[num_unique_centers]", "softtriple/figure9: columns: unknown metric 'num_unique_centers'; did you mean"),
        ("metric: num_unique_centres", "metric: map@R", "softtriple/figure9: claim 'With the .*': unknown metric 'map@R'; did you mean"),
        ("side: below", "side: below\n    reference_metric: csc_train", "softtriple/figure9: claim 'With .*': unknown metric 'csc_train'"),
    ],
)
def test_a_metric_that_nothing_brings_is_named_before_the_runs(
    old: str, new: str, said: str, params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "TABLES", shutil.copytree(file.TABLES, tmp_path / "tables"))
    text = (file.TABLES / "softtriple/figure3.yaml").read_text()
    assert old in text
    (file.TABLES / "softtriple/figure9.yaml").write_text(text.replace(old, new, 1))
    smoke = Choice(smoke=True, datasets=("drawn-80",))
    with pytest.raises(ConfigError, match=f"^{said}"):
        check_tables(Project(ROOT, ROOT, "", ""), params, chosen_runs(params, ["softtriple/figure9"], smoke), smoke)


def test_runs_are_scored_for_claims_too() -> None:
    """A claim on a metric without a column was never decided."""
    table = load_table("softtriple/figure3")
    claims = tuple(table.claims[0].model_copy(update={"metric": metric}) for metric in ("recall@5", "nmi"))
    scoring = [scoring_of("softtriple/figure3", table.model_copy(update={"claims": claims}), dataset) for dataset in table.datasets]
    assert [(one.recall_at, one.clustering) for one in scoring] == [((5,), True), ((1,), False)]
