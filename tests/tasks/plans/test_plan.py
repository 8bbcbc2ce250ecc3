"""Plans of tables: finished steps are reused, shared runs are trained once, and missing inputs are named with their remedy."""

import hashlib
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torchvision
import yaml
from typer.testing import CliRunner

from dml_core.config import merge, read_yaml
from dml_core.data.registry import materialise
from dml_core.data.store.info import INFO_FILE, MANIFEST_FILE
from dml_core.errors import ConfigError, DataError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED, PublishedFile
from dml_core.models.backbones.weights import DOWNLOADERS, _local_file
from flows.cli import main
from flows.cli.app import app
from flows.request import REQUEST, requested_runs
from tasks.checks import class_names, is_prepared
from tasks.data import prepare_dataset
from tasks.environment import Project, find_project
from tasks.plans.needs import check_searched, check_tables, dataset_need, weights_need
from tasks.plans.plan import PlannedRun, plan_tables
from tasks.plans.times import RATES_FILE
from tasks.runs.params.file import load_params
from tasks.sealed import seal
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.runs import chosen_runs
from tasks.watch.accepting import find_candidates
from tests.conftest import ROOT
from tests.damage import DAMAGE, folder
from tests.tasks.plans.conftest import DRAWN, finish_step, look


def planned(runs: tuple[PlannedRun, ...]) -> list[tuple[str, str]]:
    return [(run.spec.row, run.steps["train"]) for run in runs]


def test_what_is_done_is_reused_and_what_is_shared_is_trained_once(project: Project) -> None:
    here = look(project)
    table1, figure4 = plan_tables(here, ["softtriple/table1", "softtriple/figure4"], Choice())
    assert planned(table1.runs) == [("softmax-norm", "run"), ("softtriple", "run")]
    # Figure 4's ten centres with the regulariser are Table 1's SoftTriple.
    assert [row for row, will in planned(figure4.runs) if will == "shared"] == ["k10-with-regulariser"]
    shared = next(run for run in figure4.runs if run.steps["train"] == "shared")
    assert shared.steps["evaluate"] == "run", "its K are others"
    assert plan_tables(here, ["softtriple/figure4"], Choice(), alone=True)[0].runs[1].trains

    softtriple = table1.runs[1].spec
    finish_step(here, "train", softtriple)
    again = plan_tables(here, ["softtriple/table1"], Choice())[0].runs[1]
    assert again.steps == {"train": "reused", "embed": "run", "evaluate": "run"}
    for step in ("embed", "evaluate"):
        finish_step(here, step, softtriple)
    again = plan_tables(here, ["softtriple/table1"], Choice())[0].runs[1]
    assert set(again.steps.values()) == {"reused"}
    assert again.estimate.seconds == 0
    assert plan_tables(here, ["softtriple/table1"], Choice(seeds=(1,)))[0].runs[1].trains


def test_a_plan_takes_the_table_s_own_scale(project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that measures times runs its trainings one after another, so that their times add up."""
    monkeypatch.setattr("tasks.plans.times.num_cores", lambda: 8)
    rate = {"backbone": "vgg16", "crop_size": 224, "device": "cpu", "num_workers": 1, "images_per_second": 10.0}
    lines = [seal(json.dumps({"step": step, **rate})) for step in ("train", "embed")]
    project.state.mkdir(exist_ok=True)
    (project.state / RATES_FILE).write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["dml", "plan", "discriminative/table7", "--dataset", "cars196", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [run["seconds"] for run in found["tables"][0]["runs"]]
    assert len(seconds) > 1
    assert sum(seconds) > 0
    assert found["seconds"] == found["tables"][0]["seconds"] == pytest.approx(sum(seconds))


def test_a_dataset_that_is_missing_and_what_to_do(project: Project) -> None:
    here = look(project)
    assert dataset_need(project, here.params, "cub200", {}) is None
    need = dataset_need(project, here.params, "cars196", {})
    assert need is not None
    assert need.stops
    assert "cars196: {reader: cars196, raw: data/raw/cars196}" in need.do
    assert "cars_annos.mat" in need.do
    (plan,) = plan_tables(here, ["softtriple/table3"], Choice())
    assert [need.what for need in plan.needs] == ["dataset cars196", "weights of bn_inception"]
    assert all(run.trains for run in plan.runs)

    # It is now in params.yaml, but its raw files are missing.
    block = {"datasets": {"cars196": {"reader": "cars196", "raw": "data/raw/cars196"}}}
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), block)))
    need = dataset_need(project, load_params(project.params_file), "cars196", {})
    assert need is not None
    assert "cars_annos.mat" in need.do
    assert "params.yaml" not in need.do
    (project.root / "data/raw/cars196").mkdir()
    (project.root / "data/raw/cars196/cars_annos.mat").touch()
    assert dataset_need(project, load_params(project.params_file), "cars196", {}) is None, "to be prepared, and nothing for a person to do"


@pytest.mark.parametrize("how", ["flip", "empty", "folder"])
def test_a_damaged_dataset_is_named_and_not_taken_for_one_that_is_not_prepared(
    how: str, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    table, path = "softtriple/table1", project.packed("cub200") / INFO_FILE
    {**DAMAGE, "folder": folder}[how](path)
    params, only = load_params(project.params_file), Choice(prepared_only=True)
    specs = {spec.label: spec for specs in chosen_runs(params, [table], only).runs for spec in specs if spec.dataset == "cub200"}
    for reads in (
        lambda: is_prepared(project, params, "cub200"),
        lambda: requested_runs(project, REQUEST.validate_python({"tables": [table], "prepared_only": True})),
        lambda: check_tables(project, params, chosen_runs(params, [table], only), only),
        lambda: find_candidates(project, params, table, specs),
    ):
        with pytest.raises(DataError, match=rf"^{path}: "):
            reads()
    assert not caplog.records
    (plan,) = plan_tables(look(project), [table], Choice(datasets=("cub200",)))
    assert [need.what for need in plan.needs if need.stops] == ["dataset cub200"]
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [str(path)]


@pytest.mark.parametrize("file", [INFO_FILE, MANIFEST_FILE])
def test_a_damaged_dataset_does_not_keep_the_runs_on_others_from_starting(
    file: str, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what is prepared: the flow prepares the damaged one again, or reports its runs as failed."""
    options = {"num_classes": 4, "images_per_class": 4, "image_size": 32, "num_modes": 1}
    block = {"datasets": {"drawn-80": {"reader": "synthetic", "raw": "data/raw/drawn-80", "options": options}}}
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), block)))
    params = load_params(project.params_file)
    materialise("synthetic", options, project.root / "data/raw/drawn-80")
    prepare_dataset(project, "drawn-80", params.datasets["drawn-80"])
    path = project.packed("cub200") / file
    path.write_bytes(b"damaged")
    if file == MANIFEST_FILE:
        with pytest.raises(DataError, match=rf"^{path}: damaged "):
            class_names(path.parent, "=")
    request = {"tables": ["softtriple/figure3", "softtriple/table1"], "prepared_only": True}
    _, runs = requested_runs(project, REQUEST.validate_python(request))
    assert {spec.dataset for spec in runs} == {"cub200", "drawn-80"}
    assert all(record.getMessage().startswith(f"{path}: ") for record in caplog.records)
    if file == INFO_FILE:
        with pytest.raises(DataError, match=rf"^{path}: "):
            requested_runs(project, REQUEST.validate_python(request | {"tables": ["softtriple/figure3"], "prepared_only": False}))


def test_a_table_that_requests_resources_is_neither_run_nor_planned_with_others(project: Project) -> None:
    timed, other = tables = ["discriminative/table7", "softtriple/table1"]

    def requested(*tables: str, **choice: object) -> tuple[int, set[str | None], bool]:
        """Return how many runs train at a time, of which tables, and whether it is reported that the timed one is omitted."""
        lines: list[str] = []
        request = REQUEST.validate_python({"tables": tables, "datasets": ["cub200"], **choice})
        params, runs = requested_runs(project, request, lines.append)
        return params.scale.concurrent_runs, {run.table for run in runs}, any(line.startswith(f"{timed}: omitted:") for line in lines)

    own = load_params(project.params_file).scale.concurrent_runs
    assert own > 1
    assert requested(timed, other, rows=["discriminative", "softtriple"]) == (own, {other}, True)
    assert requested(timed, rows=["discriminative"]) == (1, {timed}, False)
    assert requested(timed, other, rows=["softtriple"]) == (own, {other}, False)
    assert requested(timed, other, rows=["discriminative", "softtriple"], smoke=True) == (own, {timed, other}, False), "nothing is timed"
    plan = ["plan", *tables, "-d", "cub200", "--row", "softtriple"]
    assert "omitted" not in CliRunner().invoke(app, plan).stderr
    result = CliRunner().invoke(app, [*plan, "--row", "discriminative"])
    assert f"{timed}: omitted: it requests its own resources, so it runs alone: dml reproduce {timed}" in result.stderr
    assert timed not in result.stdout


def test_reproduce_names_everything_that_is_missing(project: Project) -> None:
    params = load_params(project.params_file)
    tables = ["softtriple/table1", "softtriple/table3", "softtriple/table5"]
    chosen = chosen_runs(params, tables, Choice())
    with pytest.raises(ConfigError, match=r"datasets 'cars196' and 'sop' are not in params.yaml; add below datasets: cars196: .*, sop: "):
        check_tables(project, params, chosen, Choice())
    prepared_only = Choice(prepared_only=True)
    runs = check_tables(project, params, chosen_runs(params, tables, prepared_only), prepared_only)
    assert {spec.dataset for spec in runs} == {"cub200"}
    with pytest.raises(ConfigError, match="none of the datasets of these tables is prepared"):
        check_tables(project, params, chosen_runs(params, tables[1:], prepared_only), prepared_only)

    both = {name: {"reader": name, "raw": f"data/raw/{name}"} for name in ("cars196", "sop")}
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), {"datasets": both})))
    params = load_params(project.params_file)
    with pytest.raises(ConfigError, match=r"dataset 'cars196' is not prepared and .*; also dataset 'sop' is not prepared and "):
        check_tables(project, params, chosen_runs(params, tables, Choice()), Choice())
    with pytest.raises(DataError, match="dataset 'sop' is not prepared"):
        check_tables(project, params, chosen_runs(params, tables[2:], Choice()), Choice())


def test_weights_that_are_not_here(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = plan_tables(look(project), ["softtriple/table1"], Choice())[0].runs[0].spec.training.model.backbone
    need = weights_need(backbone)
    assert need is not None
    assert not need.stops
    place = tmp_path / "torch/hub/checkpoints/bn_inception-52deb4733.pth"
    assert str(PUBLISHED["bn_inception"].address) in need.do
    assert str(place) in need.do
    assert "bn_inception-52deb4733.pth (SHA-256 begins with 52deb4733)" in need.do
    place.parent.mkdir(parents=True)
    place.write_bytes(b"another file")
    damaged = weights_need(backbone)
    assert damaged is not None
    assert damaged.stops
    assert "damaged, or another file (SHA-256 " in damaged.do
    content = b"as published"
    monkeypatch.setitem(PUBLISHED, "bn_inception", replace(PUBLISHED["bn_inception"], sha256=hashlib.sha256(content).hexdigest()[:9]))
    place.write_bytes(content)
    os.utime(place, (0, 0))
    assert weights_need(backbone) is None
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path / "weights"))
    assert str(tmp_path / "weights/bn_inception-52deb4733.pth") in str(weights_need(backbone))
    monkeypatch.setitem(PUBLISHED, "bn_inception", PublishedFile("made.pth", None, how_to_make="run the converter"))
    made = weights_need(backbone)
    assert made is not None
    assert made.stops
    assert made.do == f"run the converter; put made.pth (no SHA-256 is published) at {tmp_path}/weights/made.pth"
    assert weights_need(backbone.model_copy(update={"weights": "none"})) is None
    gone = weights_need(backbone.model_copy(update={"weights": "somewhere/net.pt"}))
    assert gone is not None
    assert gone.stops


def test_weights_of_a_presigned_address_are_planned_without_its_secrets_where_a_run_stores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan showed the signature, and the file's place was another one, so that it was missing forever."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    content, name = b"weights", f"{'long' * 50}.pth"
    address = f"https://user:word@bucket/{name}?X-Amz-Credential=a/b&X-Amz-Signature=c/d"
    backbone = BackboneConfig(name="resnet18", weights=address, weights_sha256=hashlib.sha256(content).hexdigest())
    need = weights_need(backbone)
    assert need is not None
    assert need.do.startswith(f"a run downloads them from https://bucket/{name}; without a network put the file at {tmp_path}/")
    assert not re.search("word|X-Amz", str(need))
    monkeypatch.setitem(DOWNLOADERS, "https", lambda _, path: path.write_bytes(content))
    assert str(_local_file(address, backbone.weights_sha256)) in need.do
    assert weights_need(backbone) is None


def test_a_plan_says_which_converted_file_the_released_heated_up_softmax_needs(project: Project, tmp_path: Path) -> None:
    planned = plan_tables(look(project), ["heated_up_softmax/table1"], Choice(variant="as_released"))[0]
    needs = {weights_need(run.spec.training.model.backbone) for run in planned.runs}
    assert len(needs) == 1
    need = needs.pop()
    assert need is not None
    assert need.stops
    assert "convert TF-slim's inception_v1_2016_08_28.tar.gz (docs/reference/backbones-and-datasets.md, Converted weights)" in need.do
    assert need.do.endswith(f"at {tmp_path}/torch/hub/checkpoints/inception_v1_2016_08_28.pth")


def test_the_addresses_are_torchvisions() -> None:
    published = {name: file.address for name, file in PUBLISHED.items() if file.address and name != "bn_inception"}
    assert published == {name: torchvision.models.get_model_weights(name)["IMAGENET1K_V1"].url for name in published}
    assert all(file.address.endswith(f"/{file.name}") for file in PUBLISHED.values() if file.address)


def test_images_are_counted_as_prepared_or_as_published(project: Project) -> None:
    table = load_table("sgsl/table5")
    here = look(project)
    half = DRAWN["num_classes"] // 2 * DRAWN["images_per_class"]
    assert here.dataset("cub200", table).folder
    assert here.dataset("cub200", table).counts == {"train": half, "test": half}
    assert not here.dataset("inshop", table).folder
    assert here.dataset("inshop", table).counts == {"train": 25_882, "query": 14_218, "gallery": 12_612}


@pytest.mark.parametrize(("num_classes", "reader", "is_leak"), [(8, "synthetic", True), (2, "synthetic", False), (8, "folder", False)])
def test_settings_searched_on_classes_that_are_tested_are_refused(
    num_classes: int, reader: str, is_leak: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the classes, by name, are for training: those of 8 classes are all of 4, those of 2 the first of 4."""
    datasets = {}
    for name, number in (("glyphs", 4), ("glyphs-2000", num_classes)):
        datasets[name] = {"reader": "synthetic", "raw": f"data/raw/{name}", "options": {**DRAWN, "num_classes": number}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(merge(read_yaml(ROOT / "params.yaml"), {"datasets": datasets})))
    project = find_project(tmp_path)
    params = load_params(project.params_file)
    for name in datasets:
        materialise("synthetic", params.datasets[name].options, tmp_path / "data/raw" / name)
        prepare_dataset(project, name, params.datasets[name])
    if reader != "synthetic":
        params.datasets["glyphs-2000"] = params.datasets["glyphs-2000"].model_copy(update={"reader": reader})
        monkeypatch.setattr("tasks.plans.needs.is_prepared", lambda *_: True)
    runs = [SimpleNamespace(table="project/glyphs", column="glyphs", dataset="glyphs", variant=variant) for variant in ("ours", "tuned")]
    monkeypatch.setattr("tasks.plans.needs.named_dataset", lambda params, dataset, options: dataset)
    check_searched(project, params, runs[:1])  # type: ignore[arg-type]
    if is_leak:
        says = "searched on glyphs-2000, whose training classes include test classes of glyphs ('003.Species_3' and 1 more)"
        with pytest.raises(ConfigError, match=re.escape(says)):
            check_searched(project, params, runs)  # type: ignore[arg-type]
    else:
        check_searched(project, params, runs)  # type: ignore[arg-type]
    monkeypatch.setattr("tasks.plans.needs.is_prepared", lambda project, params, name: name == "glyphs")
    check_searched(project, params, runs)  # type: ignore[arg-type]
