"""Requested tables and runs: patterns, filters, the common track, smoke."""

import shutil
from pathlib import Path

import pytest

from dml_core.errors import ConfigError
from tasks.runs.params.file import load_params
from tasks.runs.protocols import load_protocol
from tasks.tables import file
from tasks.tables.choice import Choice
from tasks.tables.file import PROJECT, chosen_tables, load_table, paper_tables, table_names
from tasks.tables.runs import chosen_runs, runs_of, runs_of_tables
from tests.conftest import ROOT


def test_patterns_mean_the_papers_tables() -> None:
    assert chosen_tables(["softtriple/table[12]", "sgsl/figure3"]) == [
        "softtriple/table1",
        "softtriple/table2",
        "sgsl/figure3",
    ]
    assert chosen_tables(["*"]) == chosen_tables(["*/*"]) == paper_tables()
    assert len(paper_tables()) == 40
    assert {name.partition("/")[0] for name in table_names()} - {name.partition("/")[0] for name in paper_tables()} <= {PROJECT}
    tables = ["project/claims", "project/fashion_mnist", "project/finetuned", "project/glyphs"]
    assert chosen_tables(["project/*"]) == tables  # the standing comparison runs without a name
    assert chosen_tables(["project/standing"]) == ["project/standing"]
    with pytest.raises(ConfigError, match=r"unknown table 'softriple/\*'; did you mean 'softtriple/"):
        chosen_tables(["sgsl/*", "softriple/*"])


@pytest.mark.parametrize("name", [".#table1.yaml", "._table1.yaml", ".table1.yaml"])
def test_hidden_files_are_no_tables(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emacs's lock of an open file, macOS's copy of attributes: gc and the other commands that load all tables failed."""
    names = table_names()
    shutil.copytree(file.TABLES, tmp_path / "tables")
    monkeypatch.setattr(file, "TABLES", tmp_path / "tables")
    (tmp_path / "tables" / "softtriple" / name).write_bytes(b"\0")
    assert table_names() == names
    assert chosen_tables(["softtriple/*"]) == [table for table in paper_tables() if table.startswith("softtriple/")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "softtriple",
            r"'softtriple' is a folder of tables; name one of them, or all as 'softtriple/\*'; `dml tables softtriple` lists them",
        ),
        ("softtripl", "unknown table 'softtripl'; did you mean 'softtriple'\\? `dml tables` lists them"),
        ("table1", "unknown table 'table1'; `dml tables` lists them"),
    ],
)
def test_a_paper_is_no_table(name: str, message: str) -> None:
    for asked in (lambda: chosen_tables([name]), lambda: load_table(name)):
        with pytest.raises(ConfigError, match=message):
            asked()


def test_narrowing_several_tables_takes_of_each_what_it_has() -> None:
    requested, _ = runs_of_tables(
        ["softtriple/table1", "softtriple/table3", "softtriple/figure4"], Choice(rows=("softtriple", "k10-with-regulariser"))
    )
    assert {place: [spec.label for spec in runs] for place, runs in requested.items()} == {
        ("softtriple/table1", "cub200"): ["softtriple as_published"],
        ("softtriple/table3", "cars196"): ["softtriple as_published"],
        ("softtriple/figure4", "cub200"): ["k10-with-regulariser as_published"],
    }
    only_cars, _ = runs_of_tables(["softtriple/table1", "softtriple/table3"], Choice(datasets=("cars196",)))
    assert list(only_cars) == [("softtriple/table3", "cars196")]
    with pytest.raises(ConfigError, match="unknown row of 2 tables 'sofftriple'; did you mean 'softtriple'"):
        runs_of_tables(["softtriple/table1", "softtriple/table3"], Choice(rows=("sofftriple",)))
    with pytest.raises(ConfigError, match="unknown dataset of softtriple/table1 'sop'"):
        runs_of_tables(["softtriple/table1"], Choice(datasets=("sop",)))


def test_a_named_row_runs_where_the_table_has_it_and_elsewhere_only_on_a_named_dataset() -> None:
    name, table = "project/claims", load_table("project/claims")
    everywhere = {dataset for dataset, runs in runs_of(name, table).items() if "softtriple-10" in {run.row for run in runs}}
    assert everywhere == {"drawn-80"} != set(table.datasets)
    assert set(runs_of(name, table, Choice(rows=("softtriple-10",)))) == everywhere
    (elsewhere, *_) = set(table.datasets) - everywhere
    assert set(runs_of(name, table, Choice(rows=("softtriple-10",), datasets=(elsewhere,)))) == {elsewhere}


def test_a_variant_that_no_row_has_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown variant of softtriple/table1 'as_relased'; did you mean 'as_released'") as caught:
        runs_of_tables(["softtriple/table1"], Choice(variant="as_relased"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="unknown variant of 2 tables 'ours'"):
        runs_of_tables(["softtriple/table1", "sgsl/table1"], Choice(variant="ours"))


def test_a_row_that_lacks_the_variant_is_listed_and_not_run_as_something_else() -> None:
    """Figure 2 has only as_published; Table 1 has both."""
    names = ["heated_up_softmax/figure2", "heated_up_softmax/table1"]
    requested, left_out = runs_of_tables(names, Choice(variant="as_released"))
    assert {name for name, _ in requested} == {"heated_up_softmax/table1"}
    assert {spec.variant for runs in requested.values() for spec in runs} == {"as_released"}
    assert left_out[names[0]] == [f"'{label}' has no variant 'as_released' (it has as_published)" for label in (
        "2(a), hard samples", "2(b), easy samples")]  # fmt: skip
    with pytest.raises(ConfigError, match=r"nothing can be run: '2\(a\), hard samples' has no variant 'as_released'"):
        chosen_runs(load_params(ROOT / "params.yaml"), names, Choice(rows=("hard",), variant="as_released"))


def test_the_common_track_differs_in_the_loss_alone() -> None:
    protocol = load_protocol("common")
    softmax_norm, softtriple = runs_of("softtriple/table1", load_table("softtriple/table1"), Choice(track="common"))["cub200"]
    assert (softmax_norm.label, softtriple.label) == ("softmax-norm common", "softtriple common")
    assert softtriple.training == protocol.training_config("cub200", "softtriple")
    # SoftMax_norm is SoftTriple's loss with one centre; the row's own options are kept.
    options = softmax_norm.training.loss.options
    assert (options["num_centres"], options["margin"], options["regulariser_weight"]) == (1, 0, 0)
    assert softmax_norm.training.model_copy(update={"loss": softtriple.training.loss}) == softtriple.training
    assert softmax_norm.evaluation == softtriple.evaluation


def test_rows_and_datasets_without_an_equivalent_say_so() -> None:
    left_out: list[str] = []
    runs_of("sgsl/table3", load_table("sgsl/table3"), Choice(track="common"), left_out=left_out)
    assert any("has no equivalent on the common track (loss 'combined')" in why for why in left_out)


@pytest.mark.parametrize(
    ("name", "dataset", "kept", "why_not"),
    [
        ("heated_up_softmax/table1", "cars196", ["sm", "bn", "hbn"], "'LN' differs in more than the loss"),
        ("tuplet_margin/table6", "cars196", ["resnet-50"], "'ResNet-101' differs in more than the loss"),
        (
            "tuplet_margin/table2",
            "cub200",
            ["tml"],
            "'TML (ours), cropped' has the loss of 'TML (ours)', and the common track keeps nothing else of a row",
        ),
    ],
)
def test_no_row_is_run_on_the_common_track_under_the_name_of_a_system_that_it_is_not(
    name: str, dataset: str, kept: list[str], why_not: str
) -> None:
    left_out: list[str] = []
    runs = runs_of(name, load_table(name), Choice(track="common"), left_out)[dataset]
    assert [spec.row for spec in runs] == kept
    assert any(line.startswith(why_not) for line in left_out)


@pytest.mark.parametrize("name", paper_tables())
def test_rows_of_a_table_are_different_runs_on_the_common_track(name: str) -> None:
    for runs in runs_of(name, load_table(name), Choice(track="common")).values():
        assert len({spec.model_copy(update={"row": ""}).model_dump_json() for spec in runs}) == len(runs)


@pytest.mark.parametrize("name", [*paper_tables(), "project/glyphs", "project/finetuned"])
def test_every_row_of_every_table_has_a_smoke_run_that_is_of_no_table(name: str) -> None:
    params = load_params(ROOT / "params.yaml")
    requested, _ = runs_of_tables([name], Choice())
    assert requested
    found = [spec for runs in chosen_runs(params, [name], Choice(smoke=True)).runs for spec in runs]
    assert len(found) == sum(map(len, requested.values()))
    for spec in found:
        assert spec.comparison == f"smoke on {spec.dataset}"
        assert spec.dataset.endswith("-smoke")
        assert spec.table == name
    assert len({(spec.dataset, spec.label, spec.seed) for spec in found}) == len(found), "MLflow would take one for another"
