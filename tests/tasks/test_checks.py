"""Refusals before a run starts, from the parameters and from a prepared dataset."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytorch_metric_learning.losses import CrossBatchMemory
from torch import Tensor

from dml_core.config import merge, read_yaml
from dml_core.data.readers.sop import Sop
from dml_core.data.store.info import MANIFEST_FILE, read_info, write_info
from dml_core.data.store.splits import open_role
from dml_core.data.views.samplers import SamplerConfig, epoch_batches, first_batch_size
from dml_core.errors import ConfigError, DataError, StoreError
from dml_core.files import file_sha256
from dml_core.models.backbones.published import PUBLISHED
from tasks.checks import check_before, check_parts, check_places, check_settings, prepared_folder, read_sizes
from tasks.data import read_packed
from tasks.environment import Project
from tasks.runs.identity import train_step
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.specs import ScaleSpec
from tests.conftest import ROOT, SYNTHETIC_OPTIONS

PARAMS = read_yaml(ROOT / "params.yaml")
SMALL = {  # the packed dataset of these tests: 36 training images of 4 classes, 36 test images
    "datasets": {"synthetic": {"options": {**SYNTHETIC_OPTIONS, "seed": 0}}},
    "comparison": {
        "protocol": {"sampler": {"num_classes_per_batch": 4, "num_samples_per_class": 2}},
        "datasets": {"synthetic": {"tuned": False, "validation": None}},
    },
    "scale": {"num_workers": 2},
}


SQUARE = {"kind": "k_by_n", "num_classes_per_batch": 3, "num_samples_per_class": 3}
MIXED_UP: list[dict[str, Any]] = [
    {"name": "pml:LiftedStructureLoss"},
    {"name": "pml:NCALoss"},
    {"name": "pml:ThresholdConsistentMarginLoss"},
    {"name": "pml:TripletMarginLoss", "options": {"swap": True}},
    {"name": "pml:ContrastiveLoss", "options": {"reducer": {"name": "PerAnchorReducer"}}},
]
OWN_WEIGHTS = {"weights": __file__, "weights_sha256": file_sha256(Path(__file__))}
OTHER_FILE = f"weights: {__file__}, weights_sha256: {'a' * 64}"
BIRDS = {"datasets": {"birds": {"reader": "folder", "raw": "gone"}}, "comparison": {"datasets": {"birds": {}}}}


def check(tmp_path: Path, packed: Path | None, **changes: Any) -> None:
    """Run both checks of every run on the synthetic dataset, with changed parameters."""
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(merge(merge(PARAMS, SMALL), changes)))
    params = load_params(path)
    runs = comparison_runs(params, "synthetic")
    check_settings(runs, params.scale, packed)
    check_parts(runs, packed)


def of_variant(**settings: Any) -> dict[str, Any]:
    return {"comparison": {"variants": {"mine": {"loss": {"name": "normalised_softmax"}, **settings}}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (of_variant(sampler={"kind": "k_by_n", "num_classes_per_batch": 5}), "num_classes_per_batch is 5, the training set has 4 classes"),
        (of_variant(sampler={"kind": "shuffled", "batch_size": 37, "drop_last": True}), "drops all 36 images"),
        (of_variant(sampler={"kind": "shuffled", "batch_size": 1}), "a batch of 1 images cannot be spread over 2 workers"),
        (of_variant(validation={"share": 0.9}), "leaves fewer than two to train"),
        (of_variant(validation={"share": 0.5}, sampler={"kind": "k_by_n"}), "num_classes_per_batch is 4, the training set has 2 classes"),
        (of_variant(model={"backbone": {"weights": "/nowhere.pt"}}), "/nowhere.pt: no such file"),
        (
            of_variant(model={"backbone": {"weights": os.path.relpath(__file__)}}),
            "a relative path, which workers do not find; write an absolute one",
        ),
        (of_variant(model={"backbone": {"weights": "imagenet"}}), "'small_cnn' has no ImageNet weights"),
        (of_variant(model={"backbone": {"weights": __file__}}), f"add weights_sha256: {OWN_WEIGHTS['weights_sha256']}"),
        (of_variant(model={"backbone": {"weights": __file__, "weights_sha256": "0" * 64}}), "the file is damaged, or another one"),
        (
            of_variant(model={"backbone": {"name": "timm:tf_efficientnet_lite0", **OWN_WEIGHTS}}),
            "transform.scaling is 'zero-one', but timm:tf_efficientnet_lite0 was trained with 'minus-one-one': set that",
        ),
        (
            of_variant(model={"backbone": {"name": "bn_inception", "width": None}}),
            "transform.crop_size: backbone 'bn_inception' does not take images of 24 x 24 pixels (",
        ),
        (
            of_variant(model={"backbone": {"name": "timm:levit_128s"}}),
            "timm's 'levit_128s' does not take images of 24 x 24 pixels (",
        ),
        (of_variant(loss={"name": "triplet_semi_hard"}), "sampler.kind is 'shuffled': set 'k_by_n'"),
        (
            of_variant(transform={"crop": "none", "padding": None}),
            "crop is 'none', so crop_size would crop only test images: choose a crop",
        ),
        (of_variant(loss={"name": "discriminative"}), "use head kind 'two_layer'"),
        (of_variant(loss={"name": "softtriple", "options": {"gama": 1.0}}), "did you mean 'gamma'?"),
        (of_variant(loss={"name": "pml:NoSuchLoss"}), "NoSuchLoss"),
        (of_variant(shard_classes=True, loss={"name": "softmax"}), "shard_classes: the classes of loss 'softmax' cannot be spread"),
        (of_variant(loss={"name": "combined", "options": {"terms": [{"weight": 1}]}}), "key 'terms.0.name' is missing"),
        (of_variant(loss={"name": "combined", "options": {"terms": ["softmax"]}}), "loss 'combined': terms.0: "),
        (of_variant(cross_batch_memory={"size": 64}), "loss 'normalised_softmax' cannot compare a batch with a memory: remove it"),
        (
            of_variant(cross_batch_memory={"size": 64}, sampler={"kind": "k_by_n"}, loss={"name": "pml:FastAPLoss"}),
            "cross_batch_memory: 'pml:FastAPLoss' cannot take a memory",
        ),
        (
            of_variant(cross_batch_memory={"size": 7}, sampler={"kind": "k_by_n"}, loss={"name": "contrastive"}),
            "cross_batch_memory: size 7 is less than a batch of 8: raise it",
        ),
        (of_variant(loss={"name": "pml:InstanceLoss"}, sampler=SQUARE), "loss 'pml:InstanceLoss' takes numbers of classes for positions"),
        (
            of_variant(
                sampler=SQUARE, loss={"name": "combined", "options": {"terms": [{"name": "softmax"}, {"name": "pml:InstanceLoss"}]}}
            ),
            "loss 'pml:InstanceLoss' takes numbers of classes for positions",
        ),
        (of_variant(loss={"name": "pml:SmoothAPLoss"}, sampler={"kind": "k_by_n"}), "needs as many classes in a batch as images of each"),
        (of_variant(loss={"name": "pml:SmoothAPLoss"}, sampler={"kind": "mined_triplets"}), "needs as many classes in a batch as images"),
        *(
            (
                of_variant(cross_batch_memory={"size": 64}, sampler=SQUARE, loss=loss),
                f"cross_batch_memory: '{loss['name']}' takes samples of",
            )
            for loss in MIXED_UP
        ),
        (of_variant(embed_at_once=2, model={"head": {"kind": "bn"}}), "embed_at_once: the BatchNorm 'head.norm' would see chunks"),
    ],
)
def test_a_run_that_cannot_work_is_named_with_what_to_change(tmp_path: Path, packed: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, packed, **changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("params.yaml: comparison: synthetic / mine: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [IndexError, RuntimeError])
def test_a_loss_that_fails_on_a_memory_is_refused_before_it_trains(
    error: type[Exception], tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(loss: object, embeddings_ND: Tensor, labels_N: Tensor, memory_MD: Tensor, *_: object) -> None:
        if len(memory_MD) > len(embeddings_ND):
            raise error("the size of tensor a (4) must match the size of tensor b (8)")

    monkeypatch.setattr("dml_core.losses.contrastive.Contrastive.compare", compare)
    with pytest.raises(
        ConfigError, match="cross_batch_memory: 'contrastive' takes samples of the memory for those of the batch; remove it"
    ):
        check(tmp_path, packed, **of_variant(cross_batch_memory={"size": 64}, sampler=SQUARE, loss={"name": "contrastive"}))


def test_the_runs_that_these_tests_change_pass(tmp_path: Path, packed: Path) -> None:
    check(tmp_path, packed)


def test_weights_with_their_hash_and_a_timm_model_with_its_scaling_pass(tmp_path: Path, packed: Path) -> None:
    check(tmp_path, packed, **of_variant(model={"backbone": OWN_WEIGHTS}))
    timm_model = {"backbone": {"name": "timm:tf_efficientnet_lite0", **OWN_WEIGHTS}}
    check(tmp_path, packed, **of_variant(model=timm_model, transform={"scaling": "minus-one-one"}))
    check(tmp_path, packed, **of_variant(model={"backbone": {"name": "timm:tf_efficientnet_lite0"}}))  # random weights take any scaling


def test_an_untrained_network_needs_no_crop_of_training_images(tmp_path: Path, packed: Path) -> None:
    check(tmp_path, packed, **of_variant(transform={"crop": "none", "padding": None}, num_epochs=0))
    check(tmp_path, packed, **of_variant(transform={"crop": "none", "padding": None, "crop_size": None}))


def test_a_memory_that_fits_passes(tmp_path: Path, packed: Path) -> None:
    supported = {f"pml:{name}" for name in CrossBatchMemory.supported_losses()} - {loss["name"] for loss in MIXED_UP[:3]}
    with_memory = {"cross_batch_memory": {"size": 8}, "sampler": {"kind": "k_by_n"}}
    variants = {f"memory-{n}": {"loss": {"name": name}, **with_memory} for n, name in enumerate(["contrastive", *sorted(supported)])}
    check(tmp_path, packed, comparison={"variants": variants | {"square": {"loss": {"name": "pml:SmoothAPLoss"}, "sampler": SQUARE}}})


def test_a_damaged_published_file_is_found_before_torch_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path))
    (tmp_path / PUBLISHED["resnet18"].name).write_bytes(b"cut")
    changes = of_variant(model={"backbone": {"name": "resnet18", "weights": "imagenet"}}, transform={"scaling": "rgb-imagenet"})
    with pytest.raises(ConfigError, match="damaged, or another file"):
        check(tmp_path, None, **changes)


def test_a_recall_beyond_what_is_searched_is_refused(tmp_path: Path, packed: Path) -> None:
    check(tmp_path, packed, evaluation={"recall_at": [1, 35]})
    with pytest.raises(ConfigError, match="36 is more than the 35 images"):
        check(tmp_path, packed, evaluation={"recall_at": [1, 36]})


def test_without_a_prepared_dataset_losses_are_checked_all_the_same(tmp_path: Path) -> None:
    check(tmp_path, None, **of_variant(sampler={"kind": "k_by_n", "num_classes_per_batch": 5}))  # checked once the dataset is prepared
    with pytest.raises(ConfigError, match="set 'k_by_n'"):
        check(tmp_path, None, **of_variant(loss={"name": "triplet_semi_hard"}))


def test_what_starts_before_parts_are_built_starts_once_and_only_if_a_run_has_to_be_trained(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path))
    runs = comparison_runs(load_params(ROOT / "params.yaml"), "synthetic", ("softmax", "softtriple"), (0,))
    calls: list[str] = []
    check_parts(runs, None, lambda: calls.append("not prepared"))
    check_parts(runs, packed, lambda: calls.append("not trained"))
    for run in runs:
        (tmp_path / train_step(run, read_packed(packed, "synthetic")).identity).touch()
    check_parts(runs, packed, lambda: calls.append("trained"))
    assert calls == ["not prepared", "not trained"]


@pytest.mark.parametrize("prepared", [True, False])
def test_batches_of_one_image_are_refused_for_a_network_with_batchnorm_alone(tmp_path: Path, packed: Path, prepared: bool) -> None:
    one = {"sampler": {"kind": "shuffled", "batch_size": 1}}
    folder, scale = packed if prepared else None, {"num_workers": 1}
    check(tmp_path, folder, scale=scale, **of_variant(model={"head": {"kind": "linear"}}, **one))
    check(tmp_path, folder, scale=scale, **of_variant(num_epochs=0, model={"head": {"kind": "bn"}}, **one))
    with pytest.raises(ConfigError, match=r"mine: sampler: the BatchNorm 'head\.norm' cannot normalise batches of one image"):
        check(tmp_path, folder, scale=scale, **of_variant(model={"head": {"kind": "bn"}}, **one))


@pytest.mark.parametrize("kind", ["shuffled", "k_by_n"])
def test_the_first_batch_is_as_large_as_the_sampler_makes_it(packed: Path, kind: Any) -> None:
    labels = open_role(packed, "train", None).labels
    for batch_size in (3, 100):
        config = SamplerConfig(kind=kind, batch_size=batch_size, num_classes_per_batch=3, num_samples_per_class=4)
        sizes = [len(batch) for batch in epoch_batches(config, labels, seed=0, epoch=0)]
        assert first_batch_size(config, len(labels), len(set(labels))) == sizes[0] == max(sizes)


def test_sizes_are_those_that_a_run_sees(packed: Path) -> None:
    validation = load_params(ROOT / "params.yaml", ["comparison.protocol.validation={share: 0.5}"])
    run = comparison_runs(validation, "synthetic")[0]
    split, held_out_role = run.training.validation, run.evaluation.model_copy(update={"role": "validation"})
    train, held_out = open_role(packed, "train", split), open_role(packed, "validation", split)
    sizes = read_sizes(packed, run.model_copy(update={"evaluation": held_out_role}))
    assert (sizes.num_images, sizes.num_classes, sizes.num_retrieved) == (len(train), len(train.class_names), len(held_out) - 1)
    assert read_sizes(packed, run).num_retrieved == len(open_role(packed, "test", None)) - 1


def test_a_dataset_without_test_images_trains_only_if_nothing_scores_them(tmp_path: Path, packed: Path) -> None:
    info = read_info(packed)
    write_info(info.model_copy(update={"roles": {"train": info.roles["train"]}}), tmp_path)
    (tmp_path / MANIFEST_FILE).symlink_to(packed / MANIFEST_FILE)

    def checked(*settings: str) -> None:
        of_validation = ["evaluation={role: validation, recall_at: [1]}", "comparison.protocol.validation={share: 0.5}"]
        params = load_params(ROOT / "params.yaml", [*of_validation, *settings])
        check_settings(comparison_runs(params, "synthetic", ["softmax"], tuned=False), params.scale, tmp_path)

    without_curve = "comparison.protocol.recall_every_epochs=null"
    checked(without_curve, "comparison.protocol.keep_epochs=[best_validation]")
    with pytest.raises(ConfigError, match="recall_every_epochs scores test images, and the dataset has none: set it to null"):
        checked()
    with pytest.raises(ConfigError, match="keep_epochs: oracle scores test images, and the dataset has none: remove oracle"):
        checked(without_curve, "comparison.protocol.keep_epochs=[oracle]")


def test_a_dataset_without_training_images_is_named(tmp_path: Path, packed: Path) -> None:
    """As after all roles of a list became `test`."""
    info = read_info(packed)
    write_info(info.model_copy(update={"roles": {"test": info.roles["test"]}}), tmp_path)
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(DataError, match=r"^dataset 'synthetic' has no training images; give some classes the role train, then prepare it"):
        check_settings(comparison_runs(params, "synthetic", ["softmax"], tuned=False), params.scale, tmp_path)


def make_project(root: Path, packed: Path | None = None, **more: str) -> Project:
    folder = root / "data" / "packed"
    folder.mkdir(parents=True)
    if packed is not None:
        (folder / "synthetic").symlink_to(packed)
    return Project(root, root / "state", **{"store": str(root / "store"), "tracking_uri": "sqlite:///x.db", **more})


def test_a_dataset_prepared_with_other_options_does_not_count(tmp_path: Path, packed: Path) -> None:
    project = make_project(tmp_path, packed)
    project.params_file.write_text(yaml.safe_dump(merge(PARAMS, SMALL)))
    assert prepared_folder(project, load_params(project.params_file), "synthetic") == project.packed("synthetic")
    project.params_file.write_text(yaml.safe_dump(PARAMS))
    assert prepared_folder(project, load_params(project.params_file), "synthetic") is None


def test_sizes_of_the_former_images_refuse_nothing_once_there_are_new_raw_files(tmp_path: Path, packed: Path) -> None:
    project = make_project(tmp_path)
    shutil.copytree(packed, project.packed("synthetic"))
    params_of = merge(merge(PARAMS, SMALL), {"evaluation": {"recall_at": [1, 100]}})
    project.params_file.write_text(yaml.safe_dump(params_of))
    params = load_params(project.params_file)
    runs = comparison_runs(params, "synthetic")
    with pytest.raises(ConfigError, match=r"recall_at: 100 is more than the 35 images"):
        check_before(project, params, runs)
    (tmp_path / params.datasets["synthetic"].raw).mkdir(parents=True)
    assert check_before(project, params, runs) is None


def test_raw_files_that_only_a_person_can_bring(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    mine = {"datasets": {"mine": {"reader": "folder", "raw": "data/raw/mine"}}, "comparison": {"datasets": {"mine": {}}}}
    project.params_file.write_text(yaml.safe_dump(merge(PARAMS, mine)))
    params = load_params(project.params_file)
    (project.root / "dvc.lock").write_text("stages: {prepare@mine: {outs: [{md5: 1a.dir}]}}")
    with pytest.raises(
        DataError, match=r"'mine' is not prepared and .*/mine has no raw files; put .*; or, if it was pushed, run: dvc pull prepare@mine$"
    ):
        check_before(project, params, comparison_runs(params, "mine"))
    assert check_before(project, params, comparison_runs(params, "synthetic")) is None  # drawn instead of downloaded


@pytest.mark.parametrize("own", ["fetch", "materialise"])
def test_a_published_dataset_that_brings_its_files_itself_is_not_brought_by_hand(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path)
    sop = {"datasets": {"sop": {"reader": "sop", "raw": "data/raw/sop"}}, "comparison": {"datasets": {"sop": {}}}}
    project.params_file.write_text(yaml.safe_dump(merge(PARAMS, sop)))
    params = load_params(project.params_file)
    with pytest.raises(DataError, match=r"'sop' is not prepared and .*data/raw/sop has no raw files; "):
        prepared_folder(project, params, "sop")
    monkeypatch.setattr(Sop, own, lambda self, raw, *progress: None)
    assert prepared_folder(project, params, "sop") is None


def test_servers_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # a port that is bound but not listened on does not answer
        bound.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{bound.getsockname()[1]}"
        (note,) = check_places(make_project(tmp_path, tracking_uri=f"http://{nobody}"), ScaleSpec())
        assert "dml sync" in note
        for variable, address in (("PREFECT_API_URL", f"http://{nobody}/api"), ("RAY_ADDRESS", nobody)):
            monkeypatch.setenv(variable, address)
            with pytest.raises(ConfigError, match=f"{variable}: .* does not answer"):
                check_places(Project(tmp_path, tmp_path, str(tmp_path), "sqlite:///x.db"), ScaleSpec())
            monkeypatch.delenv(variable)
        bound.listen()
        monkeypatch.setenv("RAY_ADDRESS", nobody)
        assert check_places(Project(tmp_path, tmp_path, str(tmp_path), f"http://{nobody}"), ScaleSpec()) == []
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert check_places(Project(tmp_path, tmp_path, str(tmp_path), "sqlite:///x.db"), ScaleSpec()) == []


def test_a_folder_as_the_store_of_a_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without it said that the dataset is not prepared, or the run trained to its end and left no file."""
    monkeypatch.setattr("tasks.checks.answers", lambda *_, **more: True)
    for address, is_named in (("10.0.0.1:6379", True), ("127.0.0.1:6379", False), ("local", False)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        notes = check_places(Project(tmp_path, tmp_path, str(tmp_path), "sqlite:///x.db"), ScaleSpec())
        assert [f"{tmp_path}: every node of the Ray cluster must reach this folder" in note for note in notes] == [True] * is_named
        assert check_places(Project(tmp_path, tmp_path, "s3://bucket", "sqlite:///x.db"), ScaleSpec()) == []


def test_a_folder_of_reports_that_cannot_be_written_is_reported_before_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "results")  # root may write everywhere
    (tmp_path / "results").mkdir()
    (note,) = check_places(make_project(tmp_path), ScaleSpec())
    assert note.startswith(f"{tmp_path / 'results'} cannot be written")


def test_an_image_cache_without_a_bucket_is_reported(tmp_path: Path) -> None:
    scale = ScaleSpec(image_cache_gb=1)
    (note,) = check_places(Project(tmp_path, tmp_path, str(tmp_path), "sqlite:///x.db"), scale)
    assert note.startswith("scale.image_cache_gb has no effect: the store is a folder")
    assert check_places(Project(tmp_path, tmp_path, "s3://bucket/store", "sqlite:///x.db"), scale) == []


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="set DML_STORE"):
        check_places(Project(tmp_path, tmp_path, "/proc/nowhere", "sqlite:///x.db"), ScaleSpec())


def test_it_is_told_in_one_line_before_anything_heavy_is_loaded(tmp_path: Path, packed: Path) -> None:
    """By one process after the other, forked from one that has loaded the command only."""
    sets = {
        "comparison.protocol.sampler.num_classes_per_batch=50": "the training set has 4 classes",
        "comparison.protocol.model.backbone.weights=/gone.pth": "/gone.pth: no such file",
        f"comparison.protocol.model.backbone={{name: small_cnn, {OTHER_FILE}}}": "the file is damaged, or another one",
        "evaluation.role=validation": "add --set 'comparison.datasets.synthetic.validation={share: 0.2}'",
    }
    told = {
        ("reproduce", "-v", "softripl"): "did you mean 'softtriple'?",
        ("run", "synthetic", "softtriple", "--set", "comparison.protocol.num_epoch=3"): "did you mean 'num_epochs'?",
        ("reproduce", "-d", "birds"): "dataset 'birds' is not prepared and",
        **{("reproduce", "--set", change): message for change, message in sets.items()},
    }
    make_project(tmp_path, packed)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(merge(merge(PARAMS, SMALL), BIRDS)))
    code = (
        "import os, sys\nfrom flows.cli import main\n"
        f"for words in {[*told]!r}:\n"
        "    if os.fork():\n"
        "        print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)\n"
        "        continue\n"
        "    sys.argv = ['dml', *words]\n"
        "    try:\n        main()\n    finally:\n"
        "        print([name for name in ('torch', 'prefect', 'ray', 'mlflow', 'pandas') if name in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DML_", "RAY_", "PREFECT_", "MLFLOW_"))}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = shown.stderr.split("\n2\n")
    assert said.pop() == "", shown.stderr
    for (words, message), lines in zip(told.items(), said, strict=True):
        first, *notes, error = lines.splitlines()
        assert first == f"dml {words[0]}: checking parameters"
        assert all(note.startswith("note: --set ") for note in notes)
        assert error.startswith("error: ")
        assert message in error
    assert len(shown.stdout.splitlines()) >= len(told)
    assert set(shown.stdout.splitlines()) == {"[]"}, shown.stdout  # modules loaded by the flow and by its second process
