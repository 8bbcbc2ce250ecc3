"""A run's network found by each of its names gives the run's own rows."""

import io
import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from dml_core import load_model
from dml_core.config import merge
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.epochs import RECALL
from dml_core.errors import ConfigError, DataError, DmlError, StoreError, TrackingError
from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.writing import Batch, add_items, build_index
from dml_core.network_description import read_description, write_description
from dml_core.training.checkpoints.file import load_checkpoint, save_checkpoint
from dml_core.training.loop import fit
from flows.cli.search import open_index_model
from flows.reuse.step_cache import SealedJSON
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.files import write_whole
from tasks.models import lookup
from tasks.models.listing import list_models
from tasks.models.lookup import find_run, resolve_model
from tasks.models.trained_runs import run_of, trained_runs
from tasks.plans.results import add_runs
from tasks.runs.embeddings import load_embeddings
from tasks.runs.identity import train_step
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.tuned import STANDING
from tasks.storage import Store
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.result import MeasuredRun, result_path
from tasks.tables.runs import runs_of
from tests.conftest import ROOT
from tests.damage import DAMAGE
from tests.tasks.models.conftest import PARAMS, make_run


def test_a_seed_that_ran_beside_those_of_params_is_listed_and_found(project: Project, tmp_path: Path) -> None:
    """As after `--seeds auto`: MLflow's `@best` is chosen among all seeds."""
    runs = comparison_runs(load_params(project.params_file), "own", ["good"])
    shutil.copytree(project.root, tmp_path / "copy")
    few = Project(tmp_path / "copy", tmp_path / "copy/state", str(tmp_path / "copy/state/store"), "")
    few.params_file.write_text(yaml.safe_dump(merge(PARAMS, {"comparison": {"seeds": [0]}})))
    first, other = (train_step(spec, read_dataset(project, "own")).identity for spec in runs)
    assert [run.spec.seed for run in trained_runs(few) if run.spec.variant == "good"] == [0]
    assert run_of(few, other) is None
    measured = MeasuredRun.of(runs[1], make_run(project, runs[1]).scores, read_dataset(project, "own").digest)
    add_runs(few, STANDING, [measured], (), None)
    assert [run.spec.seed for run in trained_runs(few) if run.spec.variant == "good"] == [0, 1]
    assert run_of(few, other) is not None
    shutil.rmtree(Path(few.store) / "train" / first)
    assert find_run(few, "own/good").trained == other


@pytest.fixture(scope="module")
def dataset(project: Project) -> PackedDataset:
    return PackedDataset(project.packed("own"), "test")


def test_rows_are_those_that_the_run_left(project: Project, dataset: PackedDataset) -> None:
    for name in ("own/good", "own/good/1", "own/untrained/0"):
        run = find_run(project, name)
        model = load_model(resolve_model(name, project))
        rows, _ = load_embeddings(Store(project.store, project.state).folder(f"embed/{run.embedded}"), "test")
        found = model.embed([dataset.raw_bytes(index) for index in range(len(dataset))], batch_size=7)
        np.testing.assert_allclose(found, rows, atol=1e-5)
        assert (model.identity, model.num_dimensions, found.dtype) == (run.trained, 16, np.float32)
        assert model.title == f"own / {run.spec.variant} / seed {run.spec.seed}"


def test_a_run_is_found_by_the_identity_of_its_training(project: Project) -> None:
    runs = list(trained_runs(project))
    assert len({run.trained for run in runs}) == len(runs) > 1
    assert [run_of(project, run.trained) for run in runs] == runs
    assert run_of(project, "0" * 32) is None


def test_a_network_of_another_epoch_has_an_identity_of_its_own(project: Project, tmp_path: Path) -> None:
    """Otherwise an index of the last epoch's embeddings would take those of the best epoch."""
    training = {"validation": {"share": 0.5}, "keep_epochs": ["best_validation"], "num_epochs": 2}
    for name, epoch in (("best", "best_validation"), ("last", "last")):
        params = merge(PARAMS, {"comparison": {"protocol": training}, "evaluation": {"epoch": epoch}})
        (tmp_path / name).mkdir()
        (tmp_path / name / "params.yaml").write_text(yaml.safe_dump(params))
        (tmp_path / name / "data").symlink_to(project.root / "data")
        own = replace(project, root=tmp_path / name, state=tmp_path / name / "state", store=str(tmp_path / "store"))
        spec = comparison_runs(load_params(own.params_file), "own")[0]
        dataset = read_dataset(own, "own")
        trained = train_step(spec, dataset).identity
        if name == "best":
            fit(
                spec.training,
                open_role(Path(dataset.folder), "train", spec.training.validation),
                spec.seed,
                Store(own.store, own.state).folder(f"train/{trained}"),
                torch.device("cpu"),
                identity=trained,
                validate=lambda model: {RECALL["best_validation"]: 0.5},
            )
        (run,) = trained_runs(own)
        network = load_model(resolve_model("own/good/0", own))
        assert network.identity == (trained if epoch == "last" else f"{trained}-best_validation") == run.network
        for text in (trained, network.identity):
            assert load_model(resolve_model(text, own)).identity == network.identity
            assert run_of(own, text) == run


def test_a_network_has_the_metric_that_the_parameters_name_now(project: Project, tmp_path: Path) -> None:
    """The metric belongs to the evaluation, so changing it trains nothing again and leaves the identity."""
    (tmp_path / "data").symlink_to(project.root / "data")
    for metric in ("cosine", "euclidean"):
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(merge(PARAMS, {"evaluation": {"metric": metric}})))
        own = replace(project, root=tmp_path, state=tmp_path / "state")
        assert load_model(resolve_model("own/good/0", own)).metric == metric


def test_a_network_has_the_name_that_the_parameters_give_its_dataset_now(project: Project, tmp_path: Path) -> None:
    for name, source in (("own", "own"), ("renamed", "own")):
        root = tmp_path / name
        params = {"datasets": {name: PARAMS["datasets"][source]}, "comparison": PARAMS["comparison"] | {"datasets": {name: {}}}}
        params["comparison"]["default_datasets"] = [name]
        root.mkdir()
        (root / "params.yaml").write_text(yaml.safe_dump(params))
        own = replace(project, root=root, state=tmp_path / "state")
        shutil.copytree(project.packed(source), own.packed(name))
        assert load_model(resolve_model(f"{name}/good/0", own)).title == f"{name} / good / seed 0"


def trained_again(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool = False) -> Project:
    """Return a copy of the project whose network `own/good/0` is extracted, and then trained to other weights under the same identity.

    With `is_killed` the second training has no record.
    """
    shutil.copytree(project.store, tmp_path / "store")
    own = replace(project, state=tmp_path / "state", store=str(tmp_path / "store"))
    records = tmp_path / "records"
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(records))
    spec = comparison_runs(load_params(own.params_file), "own", ("good",), (0,))[0]

    def record() -> None:
        trained = make_run(own, spec).checkpoint
        write_whole(records / trained.identity, json.dumps({"metadata": {}, "result": SealedJSON().dumps(trained).decode()}))

    record()
    resolve_model("own/good/0", own)
    folder = Store(own.store, own.state).folder(f"train/{find_run(own, 'own/good/0').trained}")
    checkpoint = load_checkpoint(folder)
    assert checkpoint is not None
    for name, value in checkpoint["system"].items():
        if name.startswith("model.") and value.is_floating_point():
            value += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    save_checkpoint(folder, checkpoint)
    if not is_killed:
        record()
    return own


def test_a_network_that_was_trained_again_is_extracted_again(
    project: Project, dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [dataset.raw_bytes(index) for index in range(3)]
    before = load_model(resolve_model("own/good/0", project)).embed(images)
    own = trained_again(project, tmp_path, monkeypatch)
    folder = resolve_model("own/good/0", own)
    written = (folder / "network.pt").stat().st_mtime_ns
    rows = load_model(folder).embed(images)
    assert not np.allclose(rows, before, atol=1e-3)
    fresh = replace(own, state=tmp_path / "other state")
    np.testing.assert_array_equal(rows, load_model(resolve_model("own/good/0", fresh)).embed(images))
    assert (resolve_model(find_run(own, "own/good/0").trained, own) / "network.pt").stat().st_mtime_ns == written, "extracted once"


def test_a_checkpoint_s_path_means_its_weights(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colleague's training of the same run has the same identity and, on another processor, other weights."""
    with monkeypatch.context() as records:
        other = trained_again(project, tmp_path / "other", records)
    monkeypatch.chdir(project.root)
    theirs = Path(other.store) / "train" / find_run(project, "own/good/0").trained / "checkpoint.pt"
    with pytest.raises(ConfigError, match=r"its run was trained again since, or elsewhere, and \S+ has other weights; name the run"):
        resolve_model(str(theirs), project)
    (tmp_path / "other" / "params.yaml").write_bytes(project.params_file.read_bytes())
    (tmp_path / "other" / "data").symlink_to(project.root / "data")
    (tmp_path / "other" / "state" / "store").symlink_to(other.store)
    network = resolve_model(str(theirs), project)
    checkpoint = load_checkpoint(theirs.parent)
    assert checkpoint is not None
    for name, value in torch.load(network / "network.pt").items():
        assert torch.equal(value, checkpoint["system"][f"model.{name}"]), name
    own = Path(project.store) / "train" / theirs.parent.name
    assert load_model(resolve_model(str(own), project)).weights_sha256 != load_model(network).weights_sha256


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut", "the checkpoint is damaged"),
        ("remove", "no such file; expected a run as"),
        ("another run's", "the checkpoint is another run's"),
    ],
)
def test_a_checkpoint_s_path_that_gives_no_weights_is_told_from_other_weights(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, says: str
) -> None:
    own = trained_again(project, tmp_path, monkeypatch)
    resolve_model("own/good/0", own)
    path, other = (Path(own.store) / "train" / find_run(own, f"own/{name}/0").trained / "checkpoint.pt" for name in ("good", "untrained"))
    if how in DAMAGE:
        DAMAGE[how](path)
    else:
        shutil.copy(other, path)
    with pytest.raises(DmlError, match=rf"checkpoint\.pt: {says}"):
        resolve_model(str(path), own)


def test_a_table_s_network_is_found_without_mlflow(project: Project, tmp_path: Path) -> None:
    """Its identity is listed by `dml models TABLE`; the run is of no standing comparison."""
    table, dataset = "project/fashion_mnist", "fashion-mnist"
    comparison = PARAMS["comparison"] | {"datasets": {dataset: {}}, "default_datasets": [dataset]}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"datasets": {dataset: PARAMS["datasets"]["own"]}, "comparison": comparison}))
    own = replace(project, root=tmp_path, state=tmp_path / "state", store=str(tmp_path / "store"))
    shutil.copytree(project.packed("own"), own.packed(dataset))
    (spec,) = runs_of(table, load_table(table), Choice(("untrained",), (dataset,), seeds=(1,)))[dataset]
    made = make_run(own, spec)
    identity = made.checkpoint.identity
    assert run_of(own, identity) is None, "no table was measured"
    add_runs(own, table, [MeasuredRun.of(spec, made.scores, made.dataset.digest)], (), None)
    result_path(own, "project/claims").write_text("damaged")  # which is looked at before
    run = run_of(own, identity)
    assert run is not None
    assert (run.spec, run.trained, run.scored) == (spec, identity, made.scores.identity)
    assert load_model(resolve_model(identity, own)).title == spec.title


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_a_network_that_another_machine_trained_again_is_extracted_again(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_bucket: str, kind: str
) -> None:
    """This machine shares the store, and has no record of either training."""
    again = trained_again(project, tmp_path, monkeypatch)
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path / "no records"))
    shared = f"s3://{s3_bucket}/store" if kind == "bucket" else str(tmp_path / "shared")
    here, weights = replace(again, state=tmp_path / "here", store=shared), []
    for trainer in (project, again):
        if kind == "bucket":
            Store(shared, tmp_path / "cache").push("", Path(trainer.store))
        else:
            shutil.copytree(trainer.store, shared, dirs_exist_ok=True)
        folder = resolve_model("own/good/0", here)
        written = (folder / "network.pt").stat().st_mtime_ns
        weights.append(load_model(folder).weights_sha256)
        assert (resolve_model("own/good/0", here) / "network.pt").stat().st_mtime_ns == written, "extracted once"
    assert weights == [load_model(resolve_model("own/good/0", trainer)).weights_sha256 for trainer in (project, again)]
    assert weights[0] != weights[1]


def test_a_network_whose_training_was_killed_before_its_record_is_not_taken_for_the_recorded_one(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_model(resolve_model("own/good/0", project)).weights_sha256
    own = trained_again(project, tmp_path, monkeypatch, is_killed=True)
    assert load_model(resolve_model("own/good/0", own)).weights_sha256 == before
    with pytest.raises(StoreError, match=r"checkpoint\.pt: changed or gone since its step recorded it; start the same dml reproduce again"):
        resolve_model("own/good/0", replace(own, state=tmp_path / "other state"))


def test_an_index_refuses_its_network_after_that_was_trained_again(
    project: Project, dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = load_model(resolve_model("own/good/0", project))
    batch = Batch(old.embed(dataset.raw_bytes(0)), [Item("a")])
    assert old.weights_sha256 is not None
    build_index(tmp_path / "index", [batch], old.identity, weights_sha256=old.weights_sha256)
    new = load_model(resolve_model("own/good/0", trained_again(project, tmp_path, monkeypatch)))
    index = Index.open(tmp_path / "index")
    index.check_model(old.identity, old.weights_sha256)
    index.check_model(old.identity, None)  # from embeddings, or an export
    for change in (
        lambda: index.check_model(new.identity, new.weights_sha256),
        lambda: add_items(tmp_path / "index", [batch], new.identity, new.weights_sha256),
    ):
        with pytest.raises(ConfigError, match=r"trained again since, and [^\n]*; build the index again with --force$"):
            change()
    unknown = build_index(tmp_path / "of before", [batch], old.identity)
    unknown.check_model(new.identity, new.weights_sha256)


@pytest.mark.parametrize("name", ["network.json", "network.pt"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_network_is_extracted_again(project: Project, tmp_path: Path, name: str, damage: str) -> None:
    own = replace(project, state=tmp_path / "state")
    folder = resolve_model("own/good/0", own)
    whole = (folder / name).read_bytes()
    if damage == "cut":
        (folder / name).write_bytes(whole[:-20])
    else:
        (folder / name).unlink()
    assert load_model(resolve_model("own/good/0", own)).title == "own / good / seed 0"
    assert (folder / name).read_bytes() == whole


def test_an_index_opens_its_network_after_that_is_no_longer_a_run_s(
    project: Project, dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images were added since, and MLflow does not answer."""
    away = replace(project, root=tmp_path, state=tmp_path / "state", tracking_uri="http://127.0.0.1:9")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    monkeypatch.setattr("flows.cli.session.open_project", lambda: away)
    folder = tmp_path / "copy"
    shutil.copytree(resolve_model("own/good/0", project), folder)
    model = load_model(folder)
    batch = Batch(model.embed(dataset.raw_bytes(0)), [Item("a")])
    indexes = [build_index(tmp_path / f"{n}", [batch], model.identity, "cosine", None, name) for n, name in enumerate((str(folder), None))]
    assert open_index_model(indexes[0], None)[0] == folder
    with pytest.raises(TrackingError):
        open_index_model(indexes[1], None)
    shutil.copytree(folder, away.state / "models" / model.identity)
    assert open_index_model(indexes[1], None)[0] == away.state / "models" / model.identity


def test_an_index_opens_its_former_network_by_its_folder(
    project: Project, dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = tmp_path / "former"
    shutil.copytree(resolve_model("own/good/0", project), former)
    old = load_model(former)
    again = trained_again(project, tmp_path, monkeypatch)
    monkeypatch.setattr("flows.cli.session.open_project", lambda: again)
    batch = Batch(old.embed(dataset.raw_bytes(0)), [Item("a")])
    for source in (str(former), "own/good/0"):
        index = build_index(tmp_path / "index", [batch], old.identity, "cosine", None, source, True, old.weights_sha256)
        if source == str(former):
            assert open_index_model(index, None)[0] == former
        else:
            with pytest.raises(ConfigError, match="trained again since"):
                open_index_model(index, None)


@pytest.mark.parametrize("content", ["{", None])
def test_a_dataset_that_cannot_be_read_hides_only_its_own_runs(
    project: Project, tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = {"damaged": PARAMS["datasets"]["own"] | {"raw": "data/raw/damaged"}, "own": PARAMS["datasets"]["own"]}
    comparison = PARAMS["comparison"] | {"datasets": {"damaged": {}, "own": {}}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"datasets": datasets, "comparison": comparison}))
    own = replace(project, root=tmp_path, state=tmp_path / "state")
    own.packed("own").parent.mkdir(parents=True)
    own.packed("own").symlink_to(project.packed("own"))
    if content is not None:
        own.packed("damaged").mkdir()
        (own.packed("damaged") / "dataset.json").write_text(content)
    run = find_run(project, "own/good/0")
    assert load_model(resolve_model(run.trained, own)).identity == run.trained
    names = {model.run.split("/")[0] for name in (None, "own") for model in list_models(own, name, every_seed=False)[0]}
    assert names == {"own"}
    assert list_models(own, "damaged", every_seed=False)[0] == []
    warned = [record.getMessage() for record in caplog.records]
    assert all("dataset.json" in line and line.endswith("; until then it counts as not prepared") for line in warned)
    assert len(warned) == (0 if content is None else 3)


def test_images_of_several_sizes_are_embedded_together(project: Project, dataset: PackedDataset) -> None:
    model = load_model(resolve_model("own/good", project))
    large = np.random.default_rng(0).integers(0, 256, (50, 31, 3), dtype=np.uint8)
    together = model.embed([large, dataset.raw_bytes(0), large[:24, :24]])
    for row, image in zip(together, (large, dataset.raw_bytes(0), large[:24, :24]), strict=True):
        np.testing.assert_allclose(model.embed([image])[0], row, atol=1e-5)


def test_what_is_no_image_is_named(project: Project, tmp_path: Path) -> None:
    model = load_model(resolve_model("own/good", project))
    whole = io.BytesIO()
    Image.new("RGB", (30, 30)).save(whole, "PNG")
    for bad, said in (
        (b"text", "image 1: not an image"),
        (whole.getvalue()[:40], "image 1: damaged"),
        (tmp_path / "gone.jpg", "gone.jpg: cannot be read"),
        (np.zeros((4, 4), np.uint8), r"image 1: expected RGB pixels, uint8 of shape \(height, width, 3\), found uint8 of shape \(4, 4\)"),
        (np.zeros((4, 4, 3)), "found float64"),
        (Image.new("I;16", (4, 4)), "more than 8 bits"),
    ):
        with pytest.raises(DataError, match=said):
            model.embed([whole.getvalue(), bad])


def test_a_network_has_several_names(project: Project) -> None:
    folder = resolve_model("own/good", project)
    run = find_run(project, "own/good/0")
    kept = Store(project.store, project.state).folder(f"train/{run.trained}")
    assert {resolve_model(text, project) for text in (str(folder), run.trained, str(kept), str(kept / "checkpoint.pt"))} == {folder}
    assert [(run.spec.variant, run.spec.seed) for run in trained_runs(project)] == [("good", 0), ("good", 1), ("untrained", 0)]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point of `pyproject.toml`, as an installation registers it."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [line for group, points in named.items() for line in (f"[{group}]", *(f"{name} = {point}" for name, point in points.items()))]
    folder = tmp_path / "packages" / "as_installed-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: as-installed\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder.parent)


@pytest.mark.usefixtures("registered")
def test_load_model_takes_a_run_s_name_in_its_project_and_its_path_anywhere(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Store(project.store, project.state).folder(f"train/{find_run(project, 'own/good/1').trained}")
    (project.root / "deeper").mkdir(exist_ok=True)
    monkeypatch.chdir(project.root / "deeper")
    assert load_model("own/good/1").title == "own / good / seed 1"
    assert load_model(find_run(project, "own/untrained").trained).title == "own / untrained / seed 0"
    with pytest.raises(ConfigError, match=r"unknown variant 'goot'; did you mean 'good'\?"):
        load_model("own/goot")
    monkeypatch.chdir("/")
    for path in (kept, kept / "checkpoint.pt", resolve_model("own/good/1", project)):
        assert load_model(path).title == load_model(str(path)).title == "own / good / seed 1"
    monkeypatch.setattr(lookup, "__file__", str(project.root / "tasks" / "models" / "lookup.py"))  # as if the checkout were this project
    assert load_model("own/good/1").title == "own / good / seed 1"
    for text, said in (("gone/folder/of/mine", "no such folder or file"), (tmp_path, r"no network\.json there")):
        with pytest.raises(ConfigError, match=said):
            load_model(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own/untrained/1", r"not trained here; train it: dml run own untrained --seed 1"),
        ("own/goot", r"unknown variant 'goot'; did you mean 'good'\?"),
        ("owm/good", r"unknown dataset of the comparison 'owm'; did you mean 'own'\?"),
        ("nonsense", r"does not name a trained network; expected a run as dataset/variant"),
        ("own/good/zero", "does not name a trained network"),
    ],
)
def test_names_of_nothing(project: Project, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_model(text, project)


def test_a_run_on_data_that_are_not_prepared_is_not_trained(project: Project, tmp_path: Path) -> None:
    """`dml run` prepares them; preparing alone would lead to the next error."""
    (tmp_path / "params.yaml").write_bytes(project.params_file.read_bytes())
    with pytest.raises(ConfigError, match="own/good: not trained here; train it: dml run own good"):
        resolve_model("own/good", replace(project, root=tmp_path))


def test_a_description_stands_for_its_folder(project: Project) -> None:
    folder = resolve_model("own/good", project)
    assert resolve_model(str(folder / "network.json"), project) == folder


def test_damage_is_one_line(project: Project, tmp_path: Path) -> None:
    folder = resolve_model("own/good", project)
    for name in ("network.json", "network.pt"):
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / name).write_bytes((folder / name).read_bytes()[:-20])
        with pytest.raises(StoreError, match=name):
            load_model(tmp_path)
    with pytest.raises(ConfigError, match="no such folder or file"):
        load_model(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no network\.json there"):
        load_model(tmp_path / "empty")


def test_weights_that_would_run_code_are_refused(project: Project, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path(tmp_path / "sprung").write_text, ("x",))

    torch.save({"head": Trap()}, tmp_path / "network.pt")
    write_description(tmp_path, read_description(resolve_model("own/good", project)))
    with pytest.raises(StoreError, match="not the network's weights"):
        load_model(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_network_without_an_identity_is_read(project: Project, tmp_path: Path) -> None:
    folder = resolve_model("own/good", project)
    (tmp_path / "network.pt").write_bytes((folder / "network.pt").read_bytes())
    known = read_description(folder)
    write_description(tmp_path, known.model_copy(update={"identity": None}))
    model = load_model(tmp_path)
    assert len(model.identity) == 32
    assert model.identity != known.identity


def test_the_package_is_cheap_until_a_network_is_opened() -> None:
    code = "import sys, dml_core; dir(dml_core); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
