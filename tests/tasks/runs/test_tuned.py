"""Tuned settings: written, read back, and overriding those of a row and of a variant in the standing comparison."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dml_core.config import merge
from dml_core.errors import ConfigError, StoreError
from dml_core.search_space import Search
from flows.cli.tune import _print_tuned
from tasks.environment import Project
from tasks.plans.needs import search_notes
from tasks.reports.pictures import PictureCache
from tasks.reports.table_details import line_details
from tasks.runs import protocols
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.params.requested import unsearched_notes
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params
from tasks.runs.tuned import STANDING, TUNED, ConfirmedGain, Tried, TunedFile, read_tuned, tuned_path, write_tuned
from tasks.sealed import read_sealed
from tasks.storage import Store
from tasks.tables.choice import Choice
from tasks.tables.file import Row, TableFile, load_table, standing_table, table_names
from tasks.tables.result import TableResult
from tasks.tables.runs import row_training, runs_of, runs_of_tables, searched_on
from tasks.tuning.search import checked_searches, plan_searches
from tests.conftest import ROOT

TABLE, ROW, DATASET = "project/fashion_mnist", "softtriple", "fashion-mnist"
FOUND = TunedFile(
    table=TABLE,
    row=ROW,
    dataset=DATASET,
    training={"loss": {"options": {"scale": 31.25}}, "optimiser": {"groups": {"loss": {"learning_rate": 0.02}}}},
    trial=1,
    score=0.91,
    own_score=0.9,
    confirmation=ConfirmedGain(own=(0.5, 0.6, 0.5, 0.6, 0.5), winner=(0.6, 0.7, 0.61, 0.72, 0.6), gain=0.106, half_width=0.012),
    metric="recall@1",
    folds=2,
    seed=3,
    num_trials=3,
    requested_trials=2,
    tried=(Tried(params={}, scores=(0.5,)), Tried(params={"a": 1.0}, scores=(0.5, 0.6)), Tried(params={"a": 2.0}, failed="not finite")),
    space={"loss.options.scale": Search(low=5.0, high=80.0, log=True), "loss.options.num_centres": Search(choices=(1, 4))},
    fingerprint="0123",
    searched_on="89ab",
    sampler="Optuna",
    commit="a" * 40,
    study="4567",
)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable copy of all tables."""
    copy = tmp_path / "tables"
    shutil.copytree(protocols.TABLES, copy, ignore=shutil.ignore_patterns(TUNED))
    for module in ("tasks.runs.protocols", "tasks.tables.file"):
        monkeypatch.setattr(f"{module}.TABLES", copy)
    return copy


def test_written_and_read_back(tables: Path) -> None:
    path = write_tuned(FOUND)
    assert path == tables / "tuned" / "project" / "fashion_mnist" / "softtriple@fashion-mnist.yaml"
    assert read_tuned(TABLE, ROW, DATASET) == FOUND
    command = "dml tune project/fashion_mnist/softtriple --dataset fashion-mnist --trials 2 --folds 2 --seed 3 --metric recall@1"
    assert path.read_text().startswith(f"# Made by `{command}`: ")
    assert "# score and own_score are means over different pairs of fold and seed (tried)" in path.read_text()
    assert "  scores: [0.5, 0.6]\n" in path.read_text(), "lists and innermost mappings are in one line"
    search = "dml tune, 3 trials, seed 3, commit aaaaaaaaaa: "
    gains = "trial 1 gains +10.6 ± 1.2 recall@1 on held-out training classes, 5 fresh pairs of fold and seed"
    assert FOUND.says == f"{search}{gains}"
    stays = FOUND.model_copy(update={"training": {}})
    assert stays.says == f"{search}the row's own settings stay, {gains}"
    unconfirmed = FOUND.model_copy(update={"confirmation": None})
    winner, own = "91.0 over 2 pairs of fold and seed", "own settings 90.0 over 1 pair of fold and seed"
    assert unconfirmed.says == f"{search}trial 1, recall@1 {winner}, {own}; not confirmed"
    failed = unconfirmed.model_copy(update={"failed": "trial 0 cannot be trained on a fresh pair: x"})
    assert failed.says == f"{unconfirmed.says}: trial 0 cannot be trained on a fresh pair: x"
    without_list = unconfirmed.model_copy(update={"tried": ()})
    assert without_list.says == f"{search}trial 1, recall@1 91.0, own settings 90.0; not confirmed"
    without_winner = unconfirmed.model_copy(update={"trial": 0, "training": {}})
    assert without_winner.says == f"{search}no trial was better than the row's own settings"
    assert table_names() == [name for name in table_names() if not name.startswith("tuned/")], "it is no table"


def test_an_option_that_is_null_and_an_unknown_commit_are_read_back(tables: Path) -> None:
    without_head = {"model": {"head": {"kind": "bn_neck", "embedding_dim": None}}}
    tried = (Tried(params={}), Tried(params={"model.head.embedding_dim": None}, scores=(0.5,)))
    found = FOUND.model_copy(update={"training": without_head, "tried": tried, "commit": None, "confirmation": None, "failed": "x"})
    found = found.model_copy(update={"fingerprint": "1234567e89012345"})  # a number in YAML 1.2
    write_tuned(found)
    assert read_tuned(TABLE, ROW, DATASET) == found


def test_what_is_not_there_damaged_or_anothers_is_refused(tables: Path) -> None:
    command = "run: dml tune project/fashion_mnist/softtriple --dataset fashion-mnist"
    with pytest.raises(ConfigError, match=f"not tuned on fashion-mnist; {command}"):
        read_tuned(TABLE, ROW, DATASET)
    path = write_tuned(FOUND.model_copy(update={"row": "softmax"})).rename(tuned_path(TABLE, ROW, DATASET))
    with pytest.raises(ConfigError, match=f"is for project/fashion_mnist/softmax on fashion-mnist; move it away, then {command}"):
        read_tuned(TABLE, ROW, DATASET)
    path.write_text("training: {}\n")
    with pytest.raises(ConfigError, match="key 'table' is missing"):
        read_tuned(TABLE, ROW, DATASET)


def test_a_search_does_not_begin_where_it_would_replace_a_file_that_cannot_be_read(tables: Path, tmp_path: Path) -> None:
    """It counted as none, and the search replaced it hours later."""
    project, path = Project(ROOT, tmp_path / "state", "", ""), write_tuned(FOUND)
    intact = path.read_text()
    with_mark = intact.replace("trial: 1\n", "<<<<<<< HEAD\ntrial: 1\n=======\ntrial: 2\n>>>>>>> main\n")
    cases = ((f"{intact}later: 1\n", "unknown key 'later'"), (with_mark, "not readable as YAML"), ("training: {}\n", "'table' is missing"))
    for text, problem in cases:
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"{problem}[^\n]*; correct the file or move it away: a search would replace it$"):
            checked_searches(project, [f"{TABLE}/{ROW}"], (), 2, 0, "recall@1", None)
    path.unlink()
    assert [search.row for search in checked_searches(project, [f"{TABLE}/{ROW}"], (), 2, 0, "recall@1", None)[1]] == [ROW]


def test_tables_that_cannot_be_written_are_said(tables: Path) -> None:
    (tables / "tuned").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot be written"):
        write_tuned(FOUND)


def test_a_row_asked_for_as_tuned_has_them_laid_over_its_own(tables: Path) -> None:
    write_tuned(FOUND)
    (own,) = runs_of(TABLE, load_table(TABLE), Choice((ROW,)))[DATASET]
    (tuned,) = runs_of(TABLE, load_table(TABLE), Choice((ROW,), variant="tuned"))[DATASET]
    assert (own.label, tuned.label) == ("softtriple ours", "softtriple tuned")
    assert tuned.training.model_dump() == merge(own.training.model_dump(), FOUND.training)
    assert tuned.training != own.training
    assert tuned.evaluation == own.evaluation


def test_settings_searched_on_other_images_or_from_other_settings_are_noted(tables: Path) -> None:
    """A class that is added moves classes of the search to the test classes, and the gain was still reported."""
    record = DatasetRecord(name="synthetic", folder="/packed", digest="0123", counts={"train": 1}, source="synthetic")

    def notes(file: TunedFile, digest: str = "0123", *settings: str) -> list[str]:
        write_tuned(file)
        params = load_params(ROOT / "params.yaml", settings)
        runs = comparison_runs(params, "synthetic", (ROW,), (0, 1), settings)
        return search_notes(params, runs, {"synthetic": record.model_copy(update={"digest": digest})})

    (search,) = plan_searches(load_params(ROOT / "params.yaml"), f"{STANDING}/{ROW}", ("synthetic",), 4, 0, "recall@1")
    own = {"table": STANDING, "dataset": "synthetic", "searched_on": searched_on(search.training, record)}
    file = FOUND.model_copy(update=own)
    (line,) = notes(file, "4567")
    assert line.startswith("project/standing/softtriple: its tuned settings were searched on other images of synthetic, or from other ")
    assert line.endswith(
        "search again: dml tune project/standing/softtriple --dataset synthetic --trials 2 --folds 2 --seed 3 --metric recall@1"
    )
    assert notes(file, "0123", "comparison.protocol.num_epochs=3") == [line]
    assert notes(file) == []
    assert notes(file, "0123", "comparison.datasets.synthetic.validation={share: 0.2}") == [], "which no search has"
    assert notes(file, "4567", "comparison.datasets.synthetic.tuned=false") == []
    assert notes(file.model_copy(update={"training": {}}), "4567") == []
    assert notes(file.model_copy(update={"searched_on": None}), "4567") == [], "files of before"


def test_columns_with_the_settings_found_on_another_are_noted_by_its_images(tables: Path) -> None:
    params = load_params(ROOT / "params.yaml")
    names = {"glyphs": params.datasets["synthetic"], "glyphs-2000": params.datasets["synthetic"]}
    params = params.model_copy(update={"datasets": params.datasets | names})
    (search,) = plan_searches(params, f"project/glyphs/{ROW}", (), 4, 0, "recall@1")
    part = DatasetRecord(name="glyphs-2000", folder="/packed", digest="0123", counts={"train": 1}, source="glyphs")
    own = {"table": "project/glyphs", "dataset": "glyphs-2000", "searched_on": searched_on(search.training, part)}
    write_tuned(FOUND.model_copy(update=own))
    by_column = runs_of("project/glyphs", load_table("project/glyphs"), Choice((ROW,), variant="tuned"))
    runs = [run.model_copy(update={"dataset": name}) for name, runs in by_column.items() for run in runs]
    whole = part.model_copy(update={"name": "glyphs", "digest": "89ab"})
    assert search_notes(params, runs, {"glyphs": whole, "glyphs-2000": part}) == []
    assert search_notes(params, runs, {"glyphs": whole}) == [], "not known"
    (line,) = search_notes(params, runs, {"glyphs": whole, "glyphs-2000": part.model_copy(update={"digest": "4567"})})
    assert "project/glyphs/softtriple: its tuned settings were searched on other images of glyphs-2000" in line


def test_columns_may_have_the_settings_found_on_another_dataset_and_are_not_searched(tables: Path) -> None:
    name = "project/glyphs"
    assert load_table(name).tuned_on("glyphs") == load_table(name).tuned_on("glyphs-2000") == "glyphs-2000"
    choice = Choice((ROW,), variant="tuned")
    with pytest.raises(ConfigError, match="not tuned on glyphs-2000; run: dml tune project/glyphs/softtriple --dataset glyphs-2000"):
        runs_of(name, load_table(name), choice)
    write_tuned(FOUND.model_copy(update={"table": name, "dataset": "glyphs-2000"}))
    own, tuned = (runs_of(name, load_table(name), Choice((ROW,), variant=variant))["glyphs"][0] for variant in (None, "tuned"))
    assert tuned.training.model_dump() == merge(own.training.model_dump(), FOUND.training)
    params = load_params(ROOT / "params.yaml")
    assert [search.column for search in plan_searches(params, f"{name}/{ROW}", (), 4, 0, "recall@1")] == ["glyphs-2000"]
    with pytest.raises(ConfigError, match="tuned runs on glyphs have the settings found on glyphs-2000; tune there"):
        plan_searches(params, f"{name}/{ROW}", ("glyphs",), 4, 0, "recall@1")


def test_a_page_names_the_dataset_of_the_search_if_it_is_another(tmp_path: Path) -> None:
    """The same settings are no change of the row on either dataset."""
    name = "project/glyphs"
    measured = read_sealed(ROOT / f"results/tables/{name}.json", TableResult)
    assert measured is not None
    (on_part,) = (
        run for run in measured.runs if (run.row, run.variant, run.dataset, run.seed) == ("contrastive", "tuned", "glyphs-2000", 0)
    )
    result = TableResult(name=name, runs=(on_part, on_part.model_copy(update={"dataset": "glyphs"})))
    params = load_params(ROOT / "params.yaml")
    (details,) = line_details(params, name, load_table(name), result, Store(str(tmp_path), tmp_path), PictureCache()).values()
    whole, part = details
    assert str(part.tuned).endswith("fresh pairs of fold and seed")
    assert whole.tuned == f"{part.tuned}, on glyphs-2000"
    assert whole.changed == part.changed == ()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (({"dataset": "glyphs", "tuned_on": "glyphs-200", "metrics": ("nmi",)},), "tuned_on: 'glyphs-200' must be a dataset of the table"),
        (
            (
                {"dataset": "glyphs", "tuned_on": "glyphs-2000", "metrics": ("nmi",)},
                {"dataset": "glyphs-2000", "tuned_on": "synthetic", "metrics": ("nmi",)},
                {"dataset": "synthetic", "metrics": ("nmi",)},
            ),
            "tuned_on: 'glyphs-2000' must be a dataset of the table that has its own searches",
        ),
        (
            (
                {"dataset": "glyphs-2000", "metrics": ("nmi",)},
                {"dataset": "glyphs", "metrics": ("nmi",)},
                {"dataset": "glyphs", "tuned_on": "glyphs-2000", "metrics": ("map@r",)},
            ),
            "columns of dataset 'glyphs' have different tuned_on",
        ),
    ],
)
def test_a_dataset_to_be_tuned_on_is_one_and_of_the_table(blocks: tuple[dict[str, Any], ...], message: str) -> None:
    table = load_table("project/glyphs").model_dump()
    with pytest.raises(ValueError, match=message):
        TableFile.model_validate(table | {"columns": blocks})


def test_of_a_whole_table_every_row_that_is_trained_has_to_be_tuned(tables: Path) -> None:
    with pytest.raises(ConfigError, match="project/fashion_mnist/softmax is not tuned on fashion-mnist; run: dml tune"):
        runs_of_tables([TABLE], Choice(variant="tuned"))
    for row in load_table(TABLE).rows:
        write_tuned(FOUND.model_copy(update={"row": row, "training": {"optimiser": {"learning_rate": 0.5}}}))
    runs = {
        spec.label: spec.training.optimiser.learning_rate for spec in runs_of_tables([TABLE], Choice(variant="tuned"))[0][TABLE, DATASET]
    }
    assert runs["untrained ours"] == 1e-3, "what is not trained has nothing to tune"
    assert {rate for name, rate in runs.items() if name.endswith(" tuned")} == {0.5}
    assert len(runs) == len(load_table(TABLE).rows)


def test_the_first_variant_is_the_default_and_never_the_tuned_one(tables: Path) -> None:
    row = load_table(TABLE).rows[ROW].model_copy(update={"variants": ("ours", "tuned")})
    table = load_table(TABLE)
    table = table.model_copy(update={"rows": table.rows | {ROW: row}})
    assert runs_of(TABLE, table, Choice((ROW,)))[DATASET][0].label == "softtriple ours"
    assert row_training(TABLE, row, DATASET) == row_training(TABLE, row, DATASET, "ours")
    for variants in (("tuned",), ("tuned", "ours")):
        with pytest.raises(ValueError, match="'tuned' changes the row's first variant"):
            Row(label="x", kind="own", published=(None,), variants=variants)


def test_the_common_track_is_not_tuned(tables: Path) -> None:
    write_tuned(FOUND.model_copy(update={"table": "softtriple/table1", "dataset": "cub200"}))
    plain, tuned = (
        runs_of_tables(["softtriple/table1"], Choice(("softtriple",), track="common", variant=variant))[0]["softtriple/table1", "cub200"]
        for variant in (None, "tuned")
    )
    assert plain == tuned


def standing(**variant: object) -> Params:
    params = load_params(ROOT / "params.yaml", ["comparison.datasets.synthetic.tuned=false"])
    variants = params.comparison.variants | {"softtriple": params.comparison.variants["softtriple"] | variant}
    return params.model_copy(update={"comparison": params.comparison.model_copy(update={"variants": variants})})


def test_a_variant_of_the_standing_comparison_may_ask_for_them(tables: Path) -> None:
    write_tuned(FOUND.model_copy(update={"table": "project/standing", "dataset": "synthetic"}))
    (own,) = comparison_runs(standing(), "synthetic", ["softtriple"], [0])
    (tuned,) = comparison_runs(standing(tuned=True), "synthetic", ["softtriple"], [0])
    assert tuned.training.model_dump() == merge(own.training.model_dump(), FOUND.training)
    assert comparison_runs(standing(tuned=False), "synthetic", ["softtriple"], [0]) == [own]
    assert comparison_runs(standing(tuned=True), "fashion-mnist", ["softtriple"], [0], tuned=False), "what a search begins at"
    with pytest.raises(
        ConfigError, match="project/standing/softtriple is not tuned on fashion-mnist; run: dml tune project/standing/softtriple"
    ):
        comparison_runs(standing(tuned=True), "fashion-mnist", ["softtriple"], [0])
    with pytest.raises(ConfigError, match="tuned: expected true or false, found 'yes'"):
        comparison_runs(standing(tuned="yes"), "synthetic", ["softtriple"], [0])


def test_a_dataset_of_the_standing_comparison_may_ask_for_them_for_all_variants_but_those_that_say_no(tables: Path) -> None:
    write_tuned(FOUND.model_copy(update={"table": "project/standing", "dataset": "synthetic"}))
    params = standing()
    datasets = params.comparison.datasets | {"synthetic": params.comparison.datasets["synthetic"] | {"tuned": True}}
    variants = {
        "softtriple": params.comparison.variants["softtriple"],
        "other": params.comparison.variants["softtriple"] | {"tuned": False},
    }
    asking = params.model_copy(update={"comparison": params.comparison.model_copy(update={"datasets": datasets, "variants": variants})})
    tuned, other = comparison_runs(asking, "synthetic", seeds=[0])
    assert tuned.training.model_dump() == merge(other.training.model_dump(), FOUND.training)
    assert tuned.training != other.training
    assert comparison_runs(asking, "fashion-mnist", ["softtriple"], [0]), "another dataset does not ask"


def with_own(dataset: dict[str, Any], variant: dict[str, Any]) -> Params:
    """The standing comparison with a variant My_Loss, and changes to the block of fashion-mnist."""
    params = standing()
    datasets = params.comparison.datasets | {"fashion-mnist": params.comparison.datasets["fashion-mnist"] | dataset}
    variants = params.comparison.variants | {"My_Loss": params.comparison.variants["softtriple"] | variant}
    return params.model_copy(update={"comparison": params.comparison.model_copy(update={"datasets": datasets, "variants": variants})})


def test_variants_without_a_search_have_their_own_settings_on_a_dataset_that_asks_for_tuned_ones(tables: Path) -> None:
    """All were refused until every variant was tuned or had `tuned: false`, which holds for all datasets."""
    write_tuned(FOUND.model_copy(update={"table": STANDING, "row": "my-loss"}))
    params, chosen = with_own({"tuned": True}, {}), ["softmax", "My_Loss", "untrained"]
    own = comparison_runs(with_own({}, {}), DATASET, chosen, [0])
    runs = {run.variant: run.training for run in comparison_runs(params, DATASET, chosen, [0])}
    assert {run.variant: runs[run.variant] == run.training for run in own} == {"untrained": True, "softmax": True, "My_Loss": False}
    assert unsearched_notes(params, comparison_runs(params, DATASET, ["My_Loss"], [0])) == []
    (note,) = unsearched_notes(params, comparison_runs(params, DATASET, chosen, [0, 1]))
    assert note == (
        "comparison.datasets.fashion-mnist.tuned: not searched there, so with their own settings: softmax; to search: "
        "dml tune project/standing/softmax --dataset fashion-mnist"
    )


def test_a_search_is_of_the_row_of_a_variant_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """settings.md and errors name the variant; only its row's name, my-loss, was accepted."""
    params = with_own({}, {})
    monkeypatch.setattr("tasks.tuning.search.load_table", lambda name: standing_table(params))
    for name in ("My_Loss", "my-loss"):
        (search,) = plan_searches(params, f"{STANDING}/{name}", ("synthetic",), 4, 0, "recall@1")
        assert search.row == "my-loss"


@pytest.mark.parametrize(
    ("dataset", "variant", "first"),
    [
        ({}, {}, "set comparison.datasets.fashion-mnist.tuned: true in params.yaml, then "),
        ({"tuned": False}, {}, "set comparison.datasets.fashion-mnist.tuned: true in params.yaml, then "),
        ({"tuned": True}, {}, ""),
        ({}, {"tuned": True}, ""),
        ({"tuned": True}, {"tuned": False}, "remove comparison.variants.My_Loss.tuned in params.yaml, then "),
        (
            {},
            {"tuned": False},
            "remove comparison.variants.My_Loss.tuned and set comparison.datasets.fashion-mnist.tuned: true in params.yaml, then ",
        ),
    ],
)
def test_the_command_that_a_search_prints_runs_what_it_found(
    dataset: dict[str, Any], variant: dict[str, Any], first: str, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named the row, which is no variant, and ran the own settings where neither the dataset nor the variant asks for tuned ones."""
    file = FOUND.model_copy(update={"table": STANDING, "row": "my-loss"})
    found: Any = SimpleNamespace(table=STANDING, row="my-loss", column=DATASET, title="x")
    header = ["trial", "pairs of fold and seed", "recall@1", "settings"]
    for training, said in ((file.training, [f"run them: {first}dml reproduce --dataset {DATASET} --variant My_Loss"]), ({}, [])):
        tuned: Any = SimpleNamespace(search=found, rows=[header], file=file.model_copy(update={"training": training}), place="p")
        _print_tuned(tuned, with_own(dataset, variant))
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("run them")] == said
    write_tuned(file)
    applied = {} if dataset.get("tuned") or variant.get("tuned") else {"tuned": True}
    params = with_own(dataset | applied, {} if variant.get("tuned") is False else variant)
    (run,) = comparison_runs(params, DATASET, ["My_Loss"], [0])
    assert run.training.loss.options["scale"] == 31.25, "the line is right"


def test_params_that_ask_for_what_is_not_tuned_yet_can_be_read(tables: Path, tmp_path: Path) -> None:
    """`dml tune` reads them to create the tuned file."""
    path = tmp_path / "params.yaml"
    path.write_text(
        (ROOT / "params.yaml").read_text().replace("softmax: {loss: {name: softmax}}", "softmax: {tuned: true, loss: {name: softmax}}")
    )
    assert load_params(path).comparison.variants["softmax"]["tuned"] is True
