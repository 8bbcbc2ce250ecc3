"""Runs that a name selects, and the error if they are missing."""

import json
import shutil
from pathlib import Path

import pytest

from dml_core.data.store.info import INFO_FILE
from dml_core.errors import ConfigError, DataError, StoreError
from flows.reuse.step_cache import SealedJSON
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.files import write_whole
from tasks.plans.results import add_runs
from tasks.reports.finished_runs import NotRunError, choose, open_sides
from tasks.runs import identity
from tasks.runs.best import VALIDATION
from tasks.runs.finished import record_provenance
from tasks.runs.identity import step_identities
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.records import CheckpointRecord, EmbeddingRecord, MetricRecord, ScoreRecord, describe_folder, hash_of_files
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING
from tasks.tables.result import MeasuredRun
from tests.tasks.reports.made_up_runs import SEEDS, TRIPLET, make_project

Made = tuple[Project, Params]


@pytest.fixture
def own(made: Made, tmp_path: Path) -> Made:
    """The same project with its own store, to be damaged."""
    project, params = made
    store = shutil.copytree(project.store, tmp_path / "store")
    return Project(project.root, tmp_path / "state", str(store), project.tracking_uri), params


def spec_of(made: Made, variant: str = "softmax", seed: int = 0) -> RunSpec:
    return comparison_runs(made[1], "photos", [variant], [seed])[0]


def folders(made: Made, spec: RunSpec) -> tuple[Path, Path]:
    """Return the folders of a run's embeddings and scores."""
    record = read_dataset(made[0], "photos")
    return Path(made[0].store) / "embed" / step_identities(spec, record)["embed"], Path(made[0].store) / "evaluate" / step_identities(
        spec, record
    )["evaluate"]


def test_a_name_is_a_run_or_a_comparison(made: Made) -> None:
    chosen = choose(*made, "photos")
    assert chosen.is_comparison
    assert [run.spec.variant for run in chosen.shown] == ["softmax", "proxy_nca", TRIPLET]
    assert {run.spec.seed for run in chosen.shown} == {0}
    assert len(chosen.runs) == 9
    assert chosen.missing == ()
    assert chosen.title == "comparison on photos"
    assert [run.spec.seed for run in choose(*made, "photos", seed=2).shown] == [2, 2, 2]
    one = choose(*made, "photos/proxy_nca/1")
    assert not one.is_comparison
    assert [(run.spec.variant, run.spec.seed) for run in one.shown] == [("proxy_nca", 1)]
    assert [run.spec.seed for run in one.runs] == list(SEEDS), "all seeds, for means and intervals"
    assert [run.spec.seed for run in choose(*made, "photos/proxy_nca").shown] == [0]


@pytest.mark.parametrize(
    ("named", "seed", "said"),
    [
        ("fotos", None, "photos"),
        ("photos/sofmax", None, "softmax"),
        ("photos/softmax/one", None, "DATASET/VARIANT/SEED"),
        ("photos/softmax/1/2", None, "DATASET/VARIANT/SEED"),
        ("photos/softmax/1", 2, "so does --seed"),
        (
            "photos/softmax/7",
            None,
            "no finished run with seed 7 .finished seeds: 0, 1, 2.; run dml reproduce --dataset photos --variant softmax",
        ),
        ("photos", 7, "the comparison on photos has no finished run with seed 7"),
    ],
)
def test_a_missing_run_is_a_one_line_error(made: Made, named: str, seed: int | None, said: str) -> None:
    with pytest.raises((ConfigError, NotRunError), match=said) as told:
        choose(*made, named, seed)
    assert "\n" not in str(told.value)


def test_a_variant_without_the_run_is_named_as_missing(own: Made) -> None:
    shutil.rmtree(folders(own, spec_of(own))[1])
    chosen = choose(*own, "photos")
    assert chosen.missing == ("softmax",)
    assert [run.spec.variant for run in chosen.shown] == ["proxy_nca", TRIPLET]
    assert {run.spec.variant for run in chosen.runs} == {"proxy_nca", TRIPLET}


def test_a_damaged_run_is_named_and_hides_no_other(own: Made, caplog: pytest.LogCaptureFixture) -> None:
    path = folders(own, spec_of(own, seed=1))[1] / "metrics.json"
    path.write_text("{")
    chosen = choose(*own, "photos")
    assert (len(chosen.runs), chosen.missing) == (8, ())
    assert {record.getMessage().partition(": ")[0] for record in caplog.records} == {str(path)}
    with pytest.raises(NotRunError, match=r"finished seeds: 0, 2.; run dml reproduce --dataset photos --variant softmax --seed 1"):
        choose(*own, "photos/softmax/1")


def test_seeds_that_ran_beside_those_of_params_count(own: Made) -> None:
    """As after `--seeds auto`: `dml compare` has them, too."""
    project, params = own
    few = params.model_copy(update={"comparison": params.comparison.model_copy(update={"seeds": SEEDS[:1]})})
    assert {run.spec.seed for run in choose(project, few, "photos/softmax").runs} == {SEEDS[0]}
    scores = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics={})
    add_runs(project, STANDING, [MeasuredRun.of(spec_of(own, seed=seed), scores, "d") for seed in SEEDS[1:]], (), None)
    assert [run.spec.seed for run in choose(project, few, "photos/softmax").runs] == list(SEEDS)


def test_a_variant_that_is_not_tuned_yet_hides_no_finished_run(made: Made) -> None:
    variants = made[1].comparison.variants | {"mine": {"loss": {"name": "softmax"}, "tuned": True}}
    params = made[1].model_copy(update={"comparison": made[1].comparison.model_copy(update={"variants": variants})})
    assert [run.spec.variant for run in choose(made[0], params, "photos").shown] == ["softmax", "proxy_nca", TRIPLET]
    with pytest.raises(ConfigError, match="project/standing/mine is not tuned on photos"):
        choose(made[0], params, "photos/mine")


def test_runs_made_by_older_code_are_found_and_marked(own: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, record = spec_of(own), read_dataset(own[0], "photos")
    trained = identity.train_step(spec, record)
    embedded = identity.embed_step(spec, trained.identity)
    for step in (trained, embedded, identity.evaluate_step(spec, embedded.identity)):
        record_provenance(own[0].state, step)
    assert choose(*own, "photos/softmax").shown[0].is_current
    monkeypatch.setitem(identity.STEP_MODULES, "evaluate", ("tasks.scores.evaluation", "tasks.processes"))  # as if scoring used other code
    found = choose(*own, "photos/softmax").shown[0]
    assert not found.is_current
    assert found.scores == Path(own[0].store) / "evaluate" / found.identity
    _, scored_again = folders(own, spec)
    write_whole(scored_again / "metrics.json", b"{")  # damaged
    assert choose(*own, "photos/softmax").shown[0] == found, "as in tables"


def test_a_run_whose_network_was_trained_again_is_missing_until_it_is_scored(own: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, store = spec_of(own), Path(own[0].store)
    records = own[0].state / "records"
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(records))
    steps = step_identities(spec, read_dataset(own[0], "photos"))
    files = describe_folder(store / "evaluate" / steps["evaluate"])
    trained = CheckpointRecord(step="train", identity=steps["train"], key="", files=files)
    embedded = EmbeddingRecord(step="embed", identity=steps["embed"], key="", files=files)
    scores = ScoreRecord(step="evaluate", identity=steps["evaluate"], key="", files=files, inputs=hash_of_files([trained, embedded]))
    again = trained.model_copy(update={"files": files[:1]})
    for network, missing in ((trained, ()), (again, ("softmax",))):
        for record in (network, embedded, scores):
            write_whole(records / record.identity, json.dumps({"result": SealedJSON().dumps(record).decode()}))
        assert choose(*own, "photos").missing == missing


def test_missing_embeddings_or_those_of_other_images_are_refused(own: Made) -> None:
    embedded, _ = folders(own, spec_of(own))
    run = choose(*own, "photos/softmax").shown[0]
    record = read_dataset(own[0], "photos")
    manifest = json.loads((embedded / "manifest.json").read_text())
    labels = embedded / manifest["test"]["labels"]
    labels.write_bytes(labels.read_bytes()[:-8] + (0).to_bytes(8, "little"))
    with pytest.raises(StoreError, match="embeddings of other images than those in"):
        open_sides(own[0], run, record)
    (embedded / "manifest.json").unlink()
    with pytest.raises(StoreError, match="the embeddings of photos / softmax / seed 0 are missing"):
        open_sides(own[0], run, record)
    with pytest.raises(NotRunError):
        choose(*own, "photos/softmax/0")


def test_without_prepared_data_the_command_is_named_that_also_prepares_them(made: Made, tmp_path: Path) -> None:
    project, params = made
    elsewhere = Project(tmp_path, project.state, project.store, project.tracking_uri)
    with pytest.raises(NotRunError, match="the comparison on photos has no finished run with seed 0; run dml reproduce --dataset photos"):
        choose(elsewhere, params, "photos")
    with pytest.raises(NotRunError, match="run dml reproduce --dataset photos --variant softmax --seed 0"):
        choose(elsewhere, params, "photos/softmax")
    elsewhere.packed("photos").mkdir(parents=True)
    (elsewhere.packed("photos") / INFO_FILE).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        choose(elsewhere, params, "photos")


def test_a_project_without_a_store_has_no_finished_run(tmp_path: Path) -> None:
    project, params = make_project(tmp_path / "project")
    shutil.rmtree(project.store)
    with pytest.raises(NotRunError, match=r"the comparison on photos has no finished run with seed 0; run dml reproduce --dataset photos"):
        choose(project, params, "photos")


def test_a_run_without_a_seed_is_the_best_on_held_out_classes(own: Made) -> None:
    for seed, score in ((0, 0.4), (1, 0.6), (2, 0.5)):
        path = folders(own, spec_of(own, seed=seed))[1] / "metrics.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {VALIDATION: score}))
    assert [run.spec.seed for run in choose(*own, "photos/softmax").shown] == [1]
    assert {run.spec.seed for run in choose(*own, "photos").shown} == {0}, "a comparison shows one seed of all variants"
