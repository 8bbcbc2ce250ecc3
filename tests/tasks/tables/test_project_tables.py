"""The project's own tables: every row trains, every claim can be judged, twins use the other library."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from dml_core.config import merge, parse, read_yaml
from dml_core.errors import ConfigError
from dml_core.losses.registry import LOSSES
from dml_core.measurements.registry import measurement, parse_measurement
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import build_system
from tasks.runs.params.comparison import variants_on
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.runs.tuned import STANDING
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, paper_tables, standing_table, table_names
from tasks.tables.result import TableResult
from tasks.tables.runs import at_scale, chosen_runs, named_dataset, run_together
from tasks.tables.view import shown_table
from tests.conftest import ROOT

PARAMS = load_params(ROOT / "params.yaml")
CLAIMS, RESULTS, FINETUNED, GLYPHS = "project/claims", "project/fashion_mnist", "project/finetuned", "project/glyphs"
NO_WEIGHTS = {"model": {"backbone": {"weights": "none"}}}
EVALUATORS = {"recall@1", "map@r", "nmi", "csc"}


def runs_of(name: str) -> dict[str, RunSpec]:
    """Return row -> its run with seed 0."""
    return {spec.row: spec for found in chosen_runs(PARAMS, [name], Choice()).runs for spec in found}


def test_the_projects_tables_stand_behind_those_of_the_papers() -> None:
    assert len(paper_tables()) == 40
    assert table_names() == [*paper_tables(), CLAIMS, RESULTS, FINETUNED, GLYPHS, STANDING]


@pytest.mark.parametrize("name", [CLAIMS, RESULTS, FINETUNED, GLYPHS])
def test_every_row_builds_and_costs_something(name: str) -> None:
    runs = runs_of(name)
    assert runs.keys() == load_table(name).rows.keys()
    for spec in runs.values():
        size = spec.training.transform.crop_size
        training = parse(TrainingConfig, merge(spec.training.model_dump(mode="json"), NO_WEIGHTS), spec.label)
        system = build_system(training, 5, 0, torch.device("cpu"))
        assert system(torch.randn(20, 3, size, size), torch.arange(20) % 5, [20]).total.isfinite(), spec.label


@pytest.mark.parametrize("name", [CLAIMS, RESULTS])
def test_every_claim_names_what_its_rows_measure(name: str) -> None:
    runs, table = runs_of(name), load_table(name)
    measured = {row: EVALUATORS.union(*(measurement(key).METRICS for key in spec.measurements)) for row, spec in runs.items()}
    for spec in runs.values():
        for measurement_name, options in spec.measurements.items():
            parse_measurement(measurement_name, options)
    for claim in table.claims:
        dataset = claim.dataset or table.flat_columns[0].dataset
        assert claim.metric in measured[claim.row], claim.says
        assert runs[claim.row].dataset == dataset, claim.says
        if isinstance(claim.reference, str):
            assert (claim.reference_metric or claim.metric) in measured[claim.reference], claim.says
            assert runs[claim.reference].dataset == dataset, claim.says
    shown = {(column.dataset, column.metric) for column in table.flat_columns}
    assert shown <= {(runs[row].dataset, metric) for row, metrics in measured.items() for metric in metrics}


def test_the_claims_are_of_all_five_papers_and_each_run_serves_one() -> None:
    table = load_table(CLAIMS)
    papers = {claim.says.partition(":")[0] for claim in table.claims}
    assert papers == {"SoftTriple", "Heated-up softmax", "Discriminative loss", "Tuplet margin", "SGSL"}
    assert {named for claim in table.claims for named in (claim.row, claim.reference) if isinstance(named, str)} == table.rows.keys()


def test_all_systems_and_baselines_have_a_row_and_twins_are_the_other_library() -> None:
    not_alone = {"combined", "center_loss", "ring_loss"}  # terms used with a softmax
    variants = {"hardtriple", "l2_constrained_softmax", "triplet_global"}
    runs = runs_of(RESULTS)
    own = {row: spec.training.loss for row, spec in runs.items() if not row.endswith("-pml")}
    assert {loss.name for loss in own.values()} == set(LOSSES) - not_alone - variants
    twins = {row: spec.training.loss for row, spec in runs.items() if row.endswith("-pml")}
    assert len(twins) == 7
    assert {row.removesuffix("-pml") for row in twins} < own.keys()
    for loss in twins.values():
        used = {loss.name, *(term["name"] for term in loss.options.get("terms", ()))} - {"combined"}
        assert all(name.startswith("pml:") for name in used)


def test_every_row_of_the_results_has_the_same_budget_and_is_compared() -> None:
    runs = runs_of(RESULTS)
    trained = [spec.training for row, spec in runs.items() if row != "untrained"]
    assert len({training.model_copy(update={"loss": None, "model": None}).model_dump_json() for training in trained}) == 1
    assert {training.model.backbone for training in trained} == {runs["untrained"].training.model.backbone}
    claims = load_table(RESULTS).claims
    for row in runs:
        if row.endswith("-pml"):
            assert [(claim.row, claim.side) for claim in claims if claim.reference == row] == [(row.removesuffix("-pml"), "either")]
        elif row != "untrained":
            against = {claim.metric for claim in claims if (claim.row, claim.reference) == (row, "untrained")}
            assert against == {"recall@1", "map@r", "nmi"}


@pytest.mark.parametrize("name", [GLYPHS, FINETUNED])
def test_the_tables_on_debian_s_files_differ_in_loss_and_head_only_and_name_a_reference(name: str) -> None:
    runs, table = runs_of(name), load_table(name)
    unpretrained = [runs.pop(row) for row in [*runs] if row.endswith("-random")]
    assert {spec.training.model.backbone.weights for spec in unpretrained} <= {"none"}
    untrained = {"project/glyphs": "untrained", "project/finetuned": "frozen"}[name]
    shared = set()
    for row, spec in runs.items():
        values = spec.training.model_dump(mode="json") | {"loss": None}
        values["model"]["head"] = None
        if row == untrained:
            assert values.pop("num_epochs") == 0
            values["num_epochs"] = runs[table.reference or ""].training.num_epochs or runs["softtriple"].training.num_epochs
        shared.add(json.dumps(values, sort_keys=True))
    assert len(shared) == 1
    assert table.reference in runs
    five = {"softtriple", "heated_up_softmax", "discriminative", "tuplet_margin", "sgsl"}
    assert five < {spec.training.loss.name for spec in runs.values()}
    backbones = {(spec.training.model.backbone.name, spec.training.model.backbone.weights) for spec in runs.values()}
    assert backbones == {("small_cnn", "none") if name == GLYPHS else ("timm:tf_efficientnet_lite0", "imagenet")}


def test_the_glyphs_table_has_the_losses_of_the_standing_comparison() -> None:
    losses = [spec.training.loss.name for row, spec in runs_of(GLYPHS).items() if row != "softtriple-1"]
    assert losses == [PARAMS.comparison.variants[name]["loss"]["name"] for name in variants_on(PARAMS, "synthetic")]


@pytest.mark.parametrize("name", [CLAIMS, RESULTS, GLYPHS, FINETUNED, "sgsl/table1"])
def test_a_column_leads_to_the_projects_dataset_and_a_run_knows_both(name: str) -> None:
    others = {"cub200": {"reader": "cub200", "raw": "r"}, "cars": {"reader": "cars196", "raw": "r"}}
    params = PARAMS.model_copy(update={"datasets": PARAMS.datasets | load_others(others)})
    named = {dataset: named_dataset(params, dataset, {}) for dataset in load_table(name).datasets}
    places = {(spec.column, spec.dataset) for runs in chosen_runs(params, [name], Choice()).runs for spec in runs}
    assert places
    assert places <= named.items()


def load_others(blocks: dict[str, dict[str, str]]) -> dict[str, object]:
    return {name: type(PARAMS.datasets["synthetic"])(**block) for name, block in blocks.items()}


def test_a_table_that_requests_resources_runs_with_a_command_of_its_own() -> None:
    timed, plain = "discriminative/table7", "sgsl/table1"
    ours, theirs = load_table(timed), load_table(plain)
    scale = at_scale(PARAMS, {timed: ours}).scale
    assert (scale.num_workers, scale.concurrent_runs) == (1, 1)
    assert scale.device == PARAMS.scale.device
    assert at_scale(PARAMS, {plain: theirs}).scale == PARAMS.scale
    lines: list[str] = []
    assert run_together([plain, timed], lines.append) == {plain: theirs}
    assert lines == [f"{timed}: omitted: it requests its own resources, so it runs alone: dml reproduce {timed}"]
    assert run_together([timed]) == {timed: ours}
    assert run_together([plain]) == {plain: theirs}
    assert at_scale(PARAMS, {}) == PARAMS
    with pytest.raises(ConfigError, match="table7: scale: unknown key 'num_worker'; did you mean 'num_workers'"):
        at_scale(PARAMS, {timed: ours.model_copy(update={"scale": {"num_worker": 1}})})
    with pytest.raises(ConfigError, match=f"{timed}, {plain} request different resources"):
        at_scale(PARAMS, {timed: ours, plain: theirs.model_copy(update={"scale": {"concurrent_runs": 2}})})


def test_the_standing_comparison_is_a_table_of_its_variants(tmp_path: Path) -> None:
    changes = {"comparison": {"variants": {"My_Loss": {"loss": {"name": "softmax"}}}}, "evaluation": {"recall_at": [2, 4]}}
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(merge(read_yaml(ROOT / "params.yaml"), changes), sort_keys=False))
    table = standing_table(load_params(path))
    assert [row.label for row in table.rows.values()] == [name for name in load_params(path).comparison.variants if name != "frozen"]
    assert "my-loss" in table.rows
    assert table.datasets == tuple(PARAMS.comparison.datasets)
    assert [column.metric for column in table.flat_columns][:3] == ["recall@2", "map@r", "nmi"]
    assert table.reference == "softmax"
    shown = shown_table(STANDING, table, TableResult(name=STANDING))
    assert set(shown.rows[0].waits.values()) == {f"start it with dml reproduce --dataset {dataset}" for dataset in table.datasets}
    path.write_text(yaml.safe_dump(merge(read_yaml(path), {"evaluation": {"clustering": False}}), sort_keys=False))
    assert {column.metric for column in standing_table(load_params(path)).flat_columns} == {"recall@2", "map@r"}


def test_the_standing_comparison_is_run_by_itself() -> None:
    with pytest.raises(ConfigError, match="project/standing cannot be named as a table; run `dml reproduce` without a table"):
        chosen_runs(PARAMS, [CLAIMS, STANDING], Choice())
