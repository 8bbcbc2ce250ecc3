"""`params.yaml` as specifications: which settings override which, and refusals."""

import re
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dml_core.config import merge, parse, read_yaml
from dml_core.errors import ConfigError
from tasks.checks import check_parts
from tasks.runs.params.comparison import comparison_runs, is_whole, variants_on
from tasks.runs.params.file import dropped_options, load_params
from tasks.runs.params.requested import limited_overrides, setting_notes, standing_runs
from tasks.runs.params.set_options import result_settings
from tasks.runs.specs import RunSpec, ScaleSpec, comparison_title
from tests.conftest import ROOT

PARAMS = merge(read_yaml(ROOT / "params.yaml"), {"comparison": {"datasets": {"synthetic": {"tuned": False}}}})


def load(tmp_path: Path, **changes: object):
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(merge(PARAMS, changes)))
    params = load_params(path)
    for dataset in params.comparison.datasets:
        check_parts(comparison_runs(params, dataset), None)
    return params


def test_a_run_is_protocol_then_dataset_then_variant(tmp_path: Path) -> None:
    changes = {
        "protocol": {"num_epochs": 7, "sampler": {"batch_size": 11}},
        "datasets": {"synthetic": {"num_epochs": 8, "optimiser": {"learning_rate": 0.5}}},
        "variants": {"softtriple": {"num_epochs": 9}},
        "seeds": [3, 4],
    }
    params = load(tmp_path, comparison=changes)
    runs = {(run.variant, run.seed): run.training for run in comparison_runs(params, "synthetic")}
    assert {seed for _, seed in runs} == {3, 4}
    assert runs["softtriple", 3].num_epochs == 9
    assert runs["softmax", 3].num_epochs == 8
    assert runs["softmax", 4].sampler.batch_size == 11
    assert runs["softmax", 4].optimiser.learning_rate == 0.5


def test_variants_and_seeds_narrow(tmp_path: Path) -> None:
    runs = comparison_runs(load(tmp_path), "synthetic", ("softtriple", "softmax"), (7,))
    assert sorted((run.variant, run.seed) for run in runs) == [("softmax", 7), ("softtriple", 7)]


def test_the_default_runs_are_a_part_and_every_run_is_the_whole(tmp_path: Path) -> None:
    others = {name: {"by_default": False} for name in PARAMS["comparison"]["variants"] if name != "softmax"}
    params = load(tmp_path, comparison={"variants": others, "num_default_seeds": 1, "seeds": [4, 0, 2]})
    every = {(variant, seed) for variant in params.comparison.variants if variant != "frozen" for seed in (4, 0, 2)}
    for asked, expected in (
        ({}, {("softmax", 4)}),
        ({"whole": True}, every),
        ({"variants": ["sgsl"]}, {("sgsl", 4)}),
        ({"variants": ["sgsl"], "whole": True}, {("sgsl", 4), ("sgsl", 0), ("sgsl", 2)}),
        ({"seeds": [7]}, {("softmax", 7)}),
    ):
        runs = standing_runs(params, **asked)["synthetic"]
        assert {(spec.variant, spec.seed) for spec in runs} == expected
        assert is_whole(params, runs) == (expected == every)
    assert not is_whole(params, standing_runs(params, whole=True)["synthetic"][1:])
    assert not is_whole(params, [])


def test_a_variant_for_pretrained_networks_runs_only_on_their_datasets(tmp_path: Path) -> None:
    backbone = {"name": "resnet18", "weights": "imagenet"}
    fine_tuned = {"tuned": False, "model": {"backbone": backbone}, "transform": {"scaling": "rgb-imagenet"}}
    params = load(tmp_path, comparison={"datasets": {"fashion-mnist": fine_tuned}})
    names = list(params.comparison.variants)
    assert variants_on(params, "fashion-mnist") == names
    assert variants_on(params, "synthetic") == [name for name in names if name != "frozen"]
    runs = standing_runs(params, ["synthetic", "fashion-mnist"])
    (frozen, *_) = [run for run in runs["fashion-mnist"] if run.variant == "frozen"]
    assert (frozen.training.num_epochs, frozen.training.model.head.kind) == (0, "identity")
    assert frozen.training.model.backbone.weights == "imagenet"
    assert "frozen" not in {run.variant for run in runs["synthetic"]}
    for dataset, seeds_of in standing_runs(params, ["synthetic", "fashion-mnist"], whole=True).items():
        assert is_whole(params, seeds_of)
        assert {run.variant for run in seeds_of} == set(variants_on(params, dataset))
    with pytest.raises(ConfigError, match="'frozen' needs a backbone with pretrained weights; that of 'synthetic' starts from random ones"):
        standing_runs(params, ["synthetic"], ["frozen"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluatoin": {}}, "unknown key 'evaluatoin'; did you mean 'evaluation'?"),
        ({"scale": {"num_worker": 1}}, "did you mean 'num_workers'?"),
        ({"scale": {"num_workers": 0}}, "scale.num_workers"),
        ({"evaluation": {"recall_at": [2, 1]}}, "must be increasing"),
        ({"datasets": {"synthetic": {"reader": "cub20"}}}, "datasets.synthetic"),
        ({"datasets": {"synthetic": {"options": {"num_clases": 3}}}}, "did you mean 'num_classes'?"),
        ({"comparison": {"default_datasets": ["synthetik"]}}, "did you mean 'synthetic'?"),
        ({"comparison": {"variants": {"softmax": {"by_default": "no"}}}}, " / softmax: by_default: expected true or false, found 'no'"),
        ({"comparison": {"variants": {"softmax": {"pretrained_only": 1}}}}, " / softmax: pretrained_only: expected true or false, found 1"),
        ({"comparison": {"num_default_seeds": 0}}, "num_default_seeds"),
        ({"comparison": {"datasets": {"sop": {}}}}, "unknown dataset 'sop'"),
        ({"comparison": {"reference": "softmx"}}, "comparison.reference: unknown variant 'softmx'; did you mean 'softmax'?"),
        ({"comparison": {"protocol": {"num_epoch": 1}}}, "did you mean 'num_epochs'?"),
        ({"comparison": {"variants": {"new": {"loss": {"name": "soft_triple"}}}}}, "did you mean 'softtriple'?"),
        ({"comparison": {"variants": {"new": {"loss": {"name": "softtriple", "options": {"gama": 1.0}}}}}}, "did you mean 'gamma'?"),
        ({"comparison": {"variants": {"new": {"loss": {"name": "softtriple", "options": {"num_centres": 0}}}}}}, "num_centres"),
        (
            {"evaluation": {"role": "validation"}},
            "no classes are held out; add --set 'comparison.datasets.fashion-mnist.validation={share: 0.2}', or set it in params.yaml",
        ),
        ({"comparison": {"protocol": {"validation": {"share": 1.0}}}}, "validation.share"),
        ({"comparison": {"protocol": {"optimiser": {"momentum": 0.9}}}}, "momentum and nesterov belong to sgd"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("params.yaml")
    assert "\n" not in str(caught.value)


def test_unknown_names_on_the_command_line(tmp_path: Path) -> None:
    params = load(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'softtriple'"):
        comparison_runs(params, "synthetic", ("softriple",))
    with pytest.raises(ConfigError, match="did you mean 'fashion-mnist'"):
        comparison_runs(params, "fashion_mnist")


def overridden(tmp_path: Path, *overrides: str):
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(PARAMS))
    return load_params(path, overrides)


def test_overrides_are_laid_over_with_yaml_values(tmp_path: Path) -> None:
    overrides = ["comparison.protocol.num_epochs=4", "comparison.protocol.optimiser.learning_rate=1e-3", "comparison.seeds=[7]"]
    params = overridden(tmp_path, *overrides)
    (run,) = comparison_runs(params, "synthetic", ["softmax"])
    assert (run.seed, run.training.num_epochs, run.training.optimiser.learning_rate) == (7, 4, 0.001)
    new = overridden(tmp_path, "comparison.variants.mine={loss: {name: softmax}, num_epochs: 1}")
    assert comparison_runs(new, "synthetic", ["mine"])[0].training.num_epochs == 1


def test_overrides_of_one_title_are_the_same_settings(tmp_path: Path) -> None:
    """MLflow and the reports keep a comparison by its title, which does not have the order of the settings."""
    backbone = "comparison.protocol.model.backbone"
    settings = [f"{backbone}={{name: resnet18, stem_pool: ceil}}", f"{backbone}.name=resnet34", f"{backbone}.last_stride=1"]
    found = [overridden(tmp_path, *order).comparison.protocol["model"]["backbone"] for order in permutations(settings)]
    assert found == [{"name": "resnet34", "last_stride": 1}] * 6
    for first, second in permutations(["comparison.protocol.num_epochs=3", " comparison.protocol.num_epochs=5"]):
        with pytest.raises(ConfigError, match=r"--set: comparison\.protocol\.num_epochs is given twice"):
            overridden(tmp_path, first, second)


def test_a_setting_of_the_protocol_that_reaches_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(dataset: str, *settings: str, variants: Sequence[str] | None = None) -> list[RunSpec]:
        return standing_runs(overridden(tmp_path, *settings), [dataset], variants, overrides=settings)[dataset]

    three = "comparison.protocol.num_epochs=3"
    assert {run.training.num_epochs for run in asked("synthetic", three)} == {0, 3}
    assert asked("fashion-mnist", "comparison.protocol.transform={crop_size: 9, flip: false}")
    assert asked("fashion-mnist", "comparison.protocol.num_epochs=20"), "the block has the same value"
    of_dataset = (
        r"--set comparison\.protocol\.num_epochs=3 has no effect on fashion-mnist: comparison\.datasets\.fashion-mnist overrides it"
    )
    with pytest.raises(ConfigError, match=of_dataset):
        asked("fashion-mnist", three)
    with pytest.raises(ConfigError, match=r"has no effect on synthetic: comparison\.variants\.untrained overrides it"):
        asked("synthetic", three, variants=["untrained"])
    monkeypatch.setattr("tasks.runs.params.comparison.read_tuned", lambda *_: SimpleNamespace(training={"num_epochs": 9}))
    with pytest.raises(ConfigError, match=r"has no effect on synthetic: comparison\.datasets\.synthetic\.tuned overrides it"):
        asked("synthetic", three, "comparison.datasets.synthetic.tuned=true", variants=["softmax"])


def test_variants_that_a_setting_of_the_protocol_does_not_reach_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_softtriple(*place: str) -> SimpleNamespace:
        return SimpleNamespace(training={"optimiser": {"learning_rate": 0.1}} if "softtriple" in place else {})

    def lines(setting: str, *variants: str) -> list[str]:
        settings = [setting, "comparison.datasets.synthetic.tuned=true"]
        params = overridden(tmp_path, *settings)
        return limited_overrides(params, standing_runs(params, ["synthetic"], variants, [0], settings), settings)

    monkeypatch.setattr("tasks.runs.params.comparison.read_tuned", of_softtriple)
    rate = "comparison.protocol.optimiser.learning_rate=1e-4"
    assert lines(rate, "untrained", "softmax", "softtriple") == [
        f"--set {rate} does not apply to softtriple on synthetic: comparison.datasets.synthetic.tuned overrides it"
    ]
    assert lines("comparison.protocol.num_epochs=3", "untrained", "softmax") == [], "an untrained variant reads no settings of training"
    assert lines(rate, "softmax") == lines("evaluation.clustering=false", "softtriple") == []
    kind = "comparison.protocol.model.head.kind=linear"
    assert lines(kind, "untrained", "discriminative") == [
        f"--set {kind} does not apply to discriminative on synthetic: comparison.variants.discriminative overrides it"
    ]
    of_dataset = "comparison.datasets.synthetic.optimiser.learning_rate=1e-4"
    assert lines(of_dataset, "softmax", "softtriple") == [
        f"--set {of_dataset} does not apply to softtriple on synthetic: comparison.datasets.synthetic.tuned overrides it"
    ]
    of_variant = "comparison.variants.softtriple.optimiser.learning_rate=1e-4"
    assert lines(of_variant, "softmax") == [f"--set {of_variant} applies to none of the requested runs"]
    of_another = "comparison.datasets.fashion-mnist.tuned=false"
    assert lines(of_another, "softmax") == [f"--set {of_another} applies to none of the requested runs"]
    for setting in (rate, of_variant):
        with pytest.raises(ConfigError, match=r"has no effect on synthetic: comparison\.datasets\.synthetic\.tuned overrides it"):
            lines(setting, "untrained", "softtriple")


@pytest.mark.parametrize(
    ("settings", "path", "why"),
    [
        ([], "sampler.batch_size=8", "sampler.kind is 'k_by_n'"),
        (["optimiser.name=sgd"], "optimiser.eps=1e-3", "optimiser.name is 'sgd'"),
        ([], "transform.crop_area=[0.5, 1.0]", "transform.crop is 'padded'"),
        ([], "transform.jitter_first=true", "transform.jitter changes nothing"),
        ([], "keep_every_epochs=4", "keep_epochs names none"),
        (
            ["schedule={kind: step, milestones: [8], floor: null}"],
            "schedule.milestones=[48, 60]",
            "the first drop is after 48 of 48 epochs",
        ),
        (["schedule={kind: every, every_epochs: 8, floor: null}"], "schedule.every_epochs=60", "the first drop is after 60 of 48 epochs"),
        (["model={backbone: {name: resnet18}, freeze_batchnorm: all}"], "model.batchnorm_momentum=0.5", "model.freeze_batchnorm is 'all'"),
        (["num_epochs=2"], "cross_batch_memory={size: 96, after_epochs: 2}", "cross_batch_memory.after_epochs is 2 of 2 epochs"),
        (["optimiser.weight_decay=0"], "optimiser.without_decay=biases", "optimiser.weight_decay is 0"),
        ([], "optimiser.groups.loss.learning_rate=1e-3", "the loss has no parameters"),
        (["model={head: {kind: identity, embedding_dim: 64}}"], "optimiser.groups.head.weight_decay=0.1", "the head has no parameters"),
        (
            ["optimiser.groups={backbone: {learning_rate: 1e-3}, head: {learning_rate: 1e-2}}"],
            "optimiser.learning_rate=1e-4",
            "every group has its own",
        ),
    ],
)
def test_a_setting_without_effect_beside_the_others_is_refused_or_named(tmp_path: Path, settings: list[str], path: str, why: str) -> None:
    """They change neither the network nor an error: a user would compare two equal settings."""
    place, others = "comparison.variants.contrastive", [f"comparison.protocol.{setting}" for setting in settings]
    own = f"{place}.{path}"
    params = overridden(tmp_path, *others, own)
    with pytest.raises(ConfigError, match=re.escape(f"--set {own} has no effect on synthetic: {why}; change that instead")):
        standing_runs(params, ["synthetic"], ["contrastive"], [0], [own])
    in_file = setting_notes(params, standing_runs(params, ["synthetic"], ["contrastive", "untrained"], [0, 1])["synthetic"])
    (line,) = [line for line in in_file if line.startswith(f"{place}.{path.partition('=')[0]}")][:1]
    assert line.endswith(f" has no effect on synthetic: {why}")


def test_settings_without_effect_for_some_variants_name_these(tmp_path: Path) -> None:
    def lines(setting: str, *more: str) -> list[str]:
        params = overridden(tmp_path, setting, *more)
        runs = standing_runs(params, ["synthetic"], ["contrastive", "heated-up-softmax", "softmax"], [0], [setting])
        assert setting_notes(params, runs["synthetic"]) == []
        return limited_overrides(params, runs, [setting])

    size = "comparison.protocol.sampler.batch_size=8"
    assert lines(size) == [f"--set {size} does not apply to contrastive on synthetic: sampler.kind is 'k_by_n'"]
    assert lines("comparison.protocol.optimiser.learning_rate=1e-4") == lines("comparison.protocol.sampler.batch_size=null") == []
    heated = "comparison.variants.heated-up-softmax.loss.options.heated_alpha=2"
    assert lines(heated) == []
    with pytest.raises(
        ConfigError, match=r"has no effect on synthetic: loss.options.heat_from 0.6 heats none of the 1 epochs; change that"
    ):
        lines(heated, "comparison.protocol.num_epochs=1")
    gamma = "comparison.variants.softtriple.loss.options.gamma=0.2"
    one_centre = overridden(tmp_path, gamma, "comparison.variants.softtriple.loss.options.num_centres=1")
    with pytest.raises(ConfigError, match=r"has no effect on synthetic: the loss's other options disable it"):
        standing_runs(one_centre, ["synthetic"], ["softtriple"], [0], [gamma])


def test_a_setting_of_the_protocol_or_a_dataset_is_named_if_it_has_no_effect_on_any_variant(tmp_path: Path) -> None:
    def lines(*settings: str) -> list[str]:
        params = overridden(tmp_path, *settings)
        return setting_notes(params, standing_runs(params, ["synthetic"], ["contrastive"], [0])["synthetic"])

    assert lines() == [], "batch_size and the loss's own rate are for other variants"
    places = "comparison.protocol", "comparison.datasets.synthetic"
    assert lines(*(f"{place}.transform.jitter_first=true" for place in places)) == [
        f"{place}.transform.jitter_first has no effect on synthetic: transform.jitter changes nothing" for place in places
    ]
    assert lines("evaluation.clustering=false", "evaluation.kmeans={num_runs: 5}") == [
        "evaluation.kmeans has no effect: evaluation.clustering is false"
    ]


def test_parts_of_a_schedule_that_the_epochs_do_not_reach_are_named(tmp_path: Path) -> None:
    def lines(*settings: str, variants: Sequence[str] = ("softmax", "heated-up-softmax", "untrained")) -> list[str]:
        params = overridden(tmp_path, *(f"comparison.{setting}" for setting in settings))
        return setting_notes(params, standing_runs(params, ["synthetic"], variants, [0])["synthetic"])

    assert lines("protocol.num_epochs=3") == []
    assert lines("protocol.num_epochs=1") == [
        "heated-up-softmax, softmax on synthetic: the warm-up takes 1 of 1 epochs: the learning rate does not reach its full value",
        "heated-up-softmax on synthetic: loss.options.heat_from 0.6 heats none of the 1 epochs",
    ]
    steps = "protocol.schedule={kind: step, floor: null, milestones: [10, 48]}"
    assert lines(steps, variants=["softmax"]) == ["softmax on synthetic: the last drop is after 48 of 48 epochs"]
    heated = "{name: heated_up_softmax, options: {heat_from: 1.0}}"
    terms = f"variants.softmax.loss={{name: combined, options: {{terms: [{{name: ring_loss}}, {heated}]}}}}"
    assert lines(terms, variants=["softmax"]) == ["softmax on synthetic: loss.options.heat_from 1 heats none of the 48 epochs"]
    cold = "variants.heated-up-softmax.loss.options.heated_alpha=null"
    never = ["comparison.variants.heated-up-softmax.loss.options.heat_from has no effect on synthetic: the loss's other options disable it"]
    assert lines("protocol.schedule.warmup_epochs=0", "protocol.num_epochs=1", cold) == never, "it is not meant to be heated"


@pytest.mark.parametrize(
    ("setting", "options", "why"),
    [
        ("evaluation.kmeans.num_runs=5", {}, "evaluation.clustering is false"),
        ("comparison.search.num_epochs.low=8", {}, "only `dml tune` reads it"),
        ("promotion.min_gain=1", {}, "only `dml models promote` reads it"),
        ("comparison.default_datasets=[synthetic]", {"datasets": ["synthetic"]}, "the datasets are named"),
        ("comparison.seeds=[7]", {"seeds": [1]}, "--seed or --seeds chooses the seeds"),
        ("comparison.num_default_seeds=2", {"seeds": [1]}, "--seed, --seeds or --all chooses the seeds"),
        ("comparison.num_default_seeds=1", {"whole": True}, "--seed, --seeds or --all chooses the seeds"),
    ],
)
def test_a_setting_that_no_run_reads_is_refused(tmp_path: Path, setting: str, options: dict[str, Any], why: str) -> None:
    """It would be in the name of a comparison with the same runs."""
    params = overridden(tmp_path, setting, "evaluation.clustering=false")
    with pytest.raises(ConfigError, match=re.escape(f"--set {setting} has no effect: {why}")):
        standing_runs(params, overrides=[setting], **options)
    if options:
        assert standing_runs(params, overrides=[setting])


def test_distances_of_unit_vectors_are_refused_or_named(tmp_path: Path) -> None:
    """They rank as cosines do: the scores would be those of the default metric under another name."""
    setting, why = "evaluation.metric=euclidean", "the test embeddings are unit vectors (model.head.normalise_at_test), which both metrics"
    params = overridden(tmp_path, setting)
    with pytest.raises(ConfigError, match=re.escape(f"--set {setting} has no effect: {why} rank alike")):
        standing_runs(params, ["synthetic"], ["softmax"], [0], [setting])
    (note,) = setting_notes(params, standing_runs(params, ["synthetic"], ["softmax"], [0])["synthetic"])
    assert note == f"evaluation.metric has no effect: {why} rank alike"
    params = overridden(tmp_path, setting, "comparison.variants.softmax.model.head.normalise_at_test=false")
    runs = standing_runs(params, ["synthetic"], ["softmax", "sgsl"], [0], [setting])["synthetic"]
    assert setting_notes(params, runs) == []


def test_freezing_the_batchnorm_of_a_network_without_one_is_refused(tmp_path: Path) -> None:
    freeze = "comparison.protocol.model.freeze_batchnorm=all"
    with pytest.raises(ConfigError, match=r"has no effect on synthetic: backbone 'small_cnn' has no BatchNorm; change that instead"):
        standing_runs(overridden(tmp_path, freeze), ["synthetic"], ["softmax"], [0], [freeze])
    params = overridden(tmp_path, freeze, "comparison.protocol.model.backbone.name=resnet18")
    assert limited_overrides(params, standing_runs(params, ["synthetic"], ["softmax"], [0], [freeze]), [freeze]) == []


@pytest.mark.parametrize(
    "setting",
    [
        "comparison.protocol.transform.test_resize=[32, 32]",
        "comparison.variants.softmax.transform={crop: random_resized, padding: null, crop_area: [0.5, 1.0]}",
        "comparison.variants.softmax.loss={name: combined, options: {terms: [{name: softmax}, {name: center_loss}]}}",
    ],
)
def test_a_list_can_be_set(tmp_path: Path, setting: str) -> None:
    params = overridden(tmp_path, setting)
    runs = standing_runs(params, ["synthetic"], ["softmax", "sgsl"], [0], [setting])
    assert limited_overrides(params, runs, [setting]) == []


def test_the_options_that_another_part_drops_are_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(PARAMS))
    model = "comparison.protocol.model.backbone"
    assert dropped_options(path, [f"{model}.name=resnet18"]) == [f"--set {model}.name=resnet18 drops {model}.width: 16"]
    both = [f"{model}={{name: resnet18, weights: imagenet}}", f"{model}.name=resnet34"]
    assert dropped_options(path, both)[1] == f"--set {model}.name=resnet34 drops {model}.weights: imagenet"
    assert dropped_options(path, [f"{model}.width=8", f"{model}.name=small_cnn", "comparison.protocol.num_epochs=2"]) == []
    (line,) = dropped_options(path, ["comparison.protocol.optimiser.name=adamw"])
    assert "comparison.protocol.optimiser.groups.loss.learning_rate: 0.01" in line, "options within options too"
    loss = "comparison.variants.sgsl.loss"
    assert dropped_options(path, [f"{loss}={{name: softmax}}"]) == [
        f"--set {loss}={{name: softmax}} drops {loss}.options.label_smoothing: 0.1"
    ]
    assert dropped_options(path, [f"{loss}.options=null"]) == [], "requested"


def documented_settings() -> dict[str, list[str]]:
    """Return place -> the `--set` settings on that line of the documents."""
    found = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            settings = [text.replace("'", "") for text in re.findall(r"--set ((?:'[^'`]*'|[^\s'`])+)", line)]
            if written := [setting for setting in settings if re.match(r"[a-z].*=", setting)]:
                found[f"{page.relative_to(ROOT)}:{number}"] = written
    return found


DOCUMENTED = documented_settings()


@pytest.mark.parametrize("settings", DOCUMENTED.values(), ids=DOCUMENTED)
def test_the_runs_of_every_documented_setting_start(tmp_path: Path, settings: list[str]) -> None:
    named = {setting.split(".")[2] for setting in settings if setting.startswith("comparison.datasets.")}
    own = named - set(PARAMS["comparison"]["datasets"])  # the reader's datasets, with pretrained networks
    datasets = {name: PARAMS["datasets"]["synthetic"] | {"raw": f"data/raw/{name}"} for name in own}
    blocks = {name: {"transform": {"scaling": "rgb-imagenet"}} for name in own}
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump(merge(PARAMS, {"datasets": datasets, "comparison": {"datasets": blocks}})))
    dataset = named.pop() if named else "synthetic"
    runs = standing_runs(load_params(params, settings), [dataset], None, [0], settings)[dataset]
    assert {run.overrides for run in runs} == {result_settings(settings)}


def test_settings_of_a_variant_reach_its_runs(tmp_path: Path) -> None:
    settings = ["comparison.variants.softmax.num_epochs=4"]
    (run,) = standing_runs(overridden(tmp_path, *settings), ["synthetic"], ["softmax"], [0], settings)["synthetic"]
    assert run.training.num_epochs == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("comparison.protocol.num_epoch=3", "did you mean 'num_epochs'?"),
        ("comparison.protcol.num_epochs=3", "did you mean 'protocol'?"),
        ("evaluation.recal_at=[1]", "did you mean 'recall_at'?"),
        ("comparison.variants.softripl.num_epochs=3", "unknown variant 'softripl'; did you mean 'softtriple'?"),
        ("comparison.datasets.synthetik.num_epochs=3", "did you mean 'synthetic'?"),
        ("comparison.variants.softtriple.loss.options.num_centres=0", "num_centres"),
        ("datasets.synthetic.options.num_classes=10", "DVC prepares datasets from params.yaml; change it there"),
        ("comparison.protocol.num_epochs", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("comparison..seeds=3", "write it as key=value"),
        ("comparison.seeds=[1", "not readable as YAML"),
        ("comparison.protocol.num_epochs=three", "num_epochs"),
    ],
)
def test_an_override_that_is_wrong_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    def checked() -> None:
        check_parts(comparison_runs(overridden(tmp_path, override), "synthetic"), None)

    with pytest.raises(ConfigError) as caught:
        checked()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_datasets_that_run_must_hold_out_the_classes_that_are_scored(tmp_path: Path) -> None:
    params = overridden(tmp_path, "evaluation.role=validation")
    assert {run.evaluation.role for run in comparison_runs(params, "synthetic")} == {"validation"}
    with pytest.raises(ConfigError, match=r"add --set 'comparison.datasets.fashion-mnist.validation="):
        comparison_runs(params, "fashion-mnist")
    both = overridden(tmp_path, "evaluation.role=validation", "comparison.datasets.fashion-mnist.validation={share: 0.2}")
    assert {run.training.validation.share for run in comparison_runs(both, "fashion-mnist") if run.training.validation} == {0.2}


@pytest.mark.parametrize("role", ["test", "validation", "train"])
def test_variants_that_hold_out_different_classes_are_in_no_comparison(tmp_path: Path, role: str) -> None:
    """They would be compared on different images; where the test classes are scored, the best run would be chosen on different ones."""
    held_out = "comparison.protocol.validation={share: 0.2}"
    overridden(tmp_path, f"evaluation.role={role}", held_out)
    with pytest.raises(ConfigError, match=r"comparison: fashion-mnist: '.+' and '.+' hold out different classes \(validation\)"):
        overridden(tmp_path, f"evaluation.role={role}", held_out, "comparison.variants.softmax.validation={share: 0.3}")
    none = f"evaluation.role={role}", held_out, "comparison.variants.softmax.validation=null"
    if role == "test":
        overridden(tmp_path, *none)  # it cannot be the best run
    else:
        with pytest.raises(ConfigError, match="hold out different classes"):
            overridden(tmp_path, *none)


@pytest.mark.parametrize("own", ["num_epochs=0", "pretrained_only=true"])
def test_a_variant_that_cannot_be_the_best_run_may_hold_out_other_classes(tmp_path: Path, own: str) -> None:
    """One is not trained, the other does not run on these datasets."""
    held_out = "comparison.protocol.validation={share: 0.2}", "comparison.variants.softmax.validation={share: 0.3}"
    assert overridden(tmp_path, *held_out, f"comparison.variants.softmax.{own}")


@pytest.mark.parametrize(
    ("key", "spellings", "in_title"),
    [
        ("comparison.protocol.optimiser.learning_rate", ("0.001", "1e-3", " 0.0010", "1.0E-3"), "0.001"),
        ("comparison.protocol.num_epochs", ("10", "0xa", " 10 "), "10"),
        ("evaluation.recall_at", ("[1, 2]", "[1,2]", "[ 1, 0x2 ]"), "[1, 2]"),
        ("comparison.protocol.transform.flip", ("true", "True", "TRUE"), "true"),
        ("comparison.protocol.sampler.kind", ("shuffled", "'shuffled'", '"shuffled"'), "shuffled"),
        ("comparison.protocol.validation", ("{share: 0.2}", "{'share': 2e-1}", '{"share": 0.2}'), '{"share": 0.2}'),
    ],
)
def test_a_value_spelt_in_several_ways_is_one_comparison(tmp_path: Path, key: str, spellings: Sequence[str], in_title: str) -> None:
    """`--set a=1e-3` for some seeds and `--set a=0.001` for others made two comparisons, whose seeds were not averaged."""
    titles = set()
    for spelling in spellings:
        settings = [f"{key}={spelling}"]
        titles |= {run.comparison for run in comparison_runs(overridden(tmp_path, *settings), "synthetic", ["softmax"], [0], settings)}
    assert titles == {f"comparison on synthetic, {key}={in_title}"}


def test_other_settings_make_a_comparison_of_their_own_and_scale_does_not(tmp_path: Path) -> None:
    neutral = [" scale.num_workers=1", "scale={max_failures: 3}", "promotion.min_gain=1"]
    overrides = ["evaluation.recall_at=[1]", *neutral, " comparison.protocol.num_epochs=3"]
    (run,) = comparison_runs(overridden(tmp_path, *overrides), "synthetic", ["softmax"], [0], overrides)
    assert run.comparison == "comparison on synthetic, comparison.protocol.num_epochs=3, evaluation.recall_at=[1]"
    (standing,) = comparison_runs(overridden(tmp_path), "synthetic", ["softmax"], [0], ["scale.num_workers=1"])
    assert standing.comparison == comparison_title("synthetic", "test") == "comparison on synthetic"
    assert comparison_title("synthetic", "test", ["comparison.default_datasets=[cub200]"]) == "comparison on synthetic"
    assert comparison_title("synthetic", "validation", ["a=1"]) == "comparison on synthetic, validation classes, a=1"


def test_what_pictures_are_of_is_the_same_in_every_table_that_shares_the_run() -> None:
    params = load_params(ROOT / "params.yaml")
    untrained, softtriple = (comparison_runs(params, "synthetic", [variant], [3])[0] for variant in ("untrained", "softtriple"))
    in_a_table = softtriple.model_copy(update={"table": "softtriple/table1", "variant": "k10 as_published"})
    assert in_a_table.subject == softtriple.subject == "synthetic / softtriple / seed 3"
    assert in_a_table.title != softtriple.title
    assert untrained.subject.startswith("synthetic / untrained, ")
    oracle = softtriple.model_copy(update={"evaluation": softtriple.evaluation.model_copy(update={"epoch": "best_validation"})})
    assert oracle.subject.endswith("seed 3 / best validation epoch")


@pytest.mark.parametrize(("given", "ends", "is_elastic"), [(3, (1, 3), False), ([1, 4], (1, 4), True), ([2, 2], (2, 2), True)])
def test_workers_are_a_number_or_the_fewest_and_the_most(given: object, ends: tuple[int, int], is_elastic: bool) -> None:
    scale = parse(ScaleSpec, {"num_workers": given}, "test")
    assert ((scale.fewest_workers, scale.most_workers), scale.is_elastic) == (ends, is_elastic)


@pytest.mark.parametrize("num_workers", [2, [1, 4]])
def test_a_shared_gpu_has_one_worker_a_run(num_workers: object) -> None:
    with pytest.raises(ConfigError, match=r"^test: runs_per_gpu above 1 needs num_workers 1: NCCL connects no two workers[^\n]*$"):
        parse(ScaleSpec, {"num_workers": num_workers, "runs_per_gpu": 2}, "test")
    assert parse(ScaleSpec, {"num_workers": 1, "runs_per_gpu": 2}, "test").runs_per_gpu == 2


@pytest.mark.parametrize("given", [0, [4, 1], [1], [0, 2], "2", 1.0, True])
def test_other_numbers_of_workers_are_refused(given: object) -> None:
    with pytest.raises(
        ConfigError, match=r"test: num_workers: expected an integer of at least 1, or a minimum and a maximum such as \[1, 4\]"
    ):
        parse(ScaleSpec, {"num_workers": given}, "test")


@pytest.mark.parametrize("length", [253, 300])
def test_a_raw_folder_with_a_long_name_is_no_crash(tmp_path: Path, length: int) -> None:
    """The name of the file by which `dvc add` would track it is longer than a file system allows."""
    assert load(tmp_path, datasets={"synthetic": {"raw": "x" * length}}).datasets["synthetic"].raw == "x" * length
