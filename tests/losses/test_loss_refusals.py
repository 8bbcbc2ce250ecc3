"""User errors are refused before training, with a one-line message that names the error and its place."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from loss_cases import CASES, build, case_id

from dml_core.data.views.samplers import SamplerConfig, check_sampler
from dml_core.errors import ConfigError, DataError
from dml_core.losses.contract import check_labels
from dml_core.losses.registry import LOSSES, build_loss


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "softtripel",
            {},
            r"^unknown loss 'softtripel'; did you mean 'softtriple'\? \(known: center_loss, .*, pml:<ClassName>, proxy_nca, .*\)$",
        ),
        ("softmax", {"bais": True}, r"^loss 'softmax': unknown key 'bais'; did you mean 'bias'\? "),
        ("softtriple", {"num_centres": 0}, "num_centres"),
        ("softtriple", {"margin": -0.01}, "margin"),
        ("softtriple", {"scale": "20"}, "scale"),
        ("softtriple", {"num_centers": 3}, "did you mean 'num_centres'"),
        ("softtriple", {"gamma": 0.0}, "gamma"),
        ("hardtriple", {"gamma": 0.1}, "unknown key 'gamma'"),
        ("softmax", {"label_smoothing": 1.0}, r"^loss 'softmax': label_smoothing"),
        ("discriminative", {"centroid_seed": -1}, "centroid_seed"),
        ("discriminative", {"centroid_seed": 2**32}, "centroid_seed"),
        ("heated_up_softmax", {"alpha": 0.0}, "alpha"),
        ("heated_up_softmax", {"heat_from": 1.5}, "heat_from"),
        ("tuplet_margin", {"slack_margin": -0.1}, "slack_margin"),
        ("tuplet_margin", {"slack_margin": 5.73}, "slack_margin"),
        ("tuplet_margin", {"negatives": "hard"}, "negatives"),
        ("contrastive", {"margin": 2.5}, "margin"),
        ("triplet_semi_hard", {"margin": 0.0}, "margin"),
        ("triplet_global", {"global_margin": -0.1}, "global_margin"),
        ("sgsl", {"gamma": -30.0}, "gamma"),
        ("sgsl", {"label_smoothing": 0.9}, r"^loss 'sgsl': label_smoothing 0.9 favours the wrong of 5 classes: lower it$"),
        ("combined", {"terms": []}, "terms"),
        ("combined", {"terms": [{"name": "softmax", "options": {"bais": True}}]}, "did you mean 'bias'"),
        ("combined", {}, "key 'terms' is missing"),
    ],
)
def test_wrong_names_and_options(name, options, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        build_loss(name, options, 5, 5)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fewer_than_two_classes(case):
    with pytest.raises(ConfigError, match=r"^a loss needs at least two classes to tell apart, the training set has 1: add classes$"):
        build(case, num_classes=1, dim=1)
    build(case, num_classes=2, dim=2)


def test_embedding_size_that_does_not_fit_the_centroids():
    with pytest.raises(ConfigError, match=r"one dimension per class \(98\), the head's output has 64: use head kind 'two_layer'"):
        build_loss("discriminative", {}, 98, 64)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 5, 7]), r"^training label 5 is outside 0\.\.4: number the classes from 0 without gaps$"),
        (torch.tensor([0, -1]), r"^training label -1 is outside 0\.\.4: number the classes from 0 without gaps$"),
        (torch.tensor([0.0]), r"^training labels must be int64 class indices, found torch\.float32: convert them$"),
    ],
)
def test_labels_out_of_range(labels, message):
    with pytest.raises(DataError, match=message):
        check_labels(labels, 5)


def test_more_classes_than_k_means_has_memory_for():
    message = r"^loss 'discriminative': centroids kmeans takes at most 1,000 classes, the training set has 3,997: .* 12\.8 GB; use one_hot$"
    with pytest.raises(ConfigError, match=message):
        build_loss("discriminative", {"centroids": "kmeans"}, 3997, 3997)
    build_loss("discriminative", {}, 3997, 3997)


def test_labels_in_range_are_let_through():
    check_labels(torch.tensor([0, 4, 4]), 5)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_loss_over_pairs_is_refused_a_shuffled_sampler(case):
    needs = build(case).needs
    check_sampler(SamplerConfig(kind="k_by_n"), needs, case[0])
    if needs.sampler == "k_by_n":
        with pytest.raises(ConfigError, match="set 'k_by_n'"):
            check_sampler(SamplerConfig(kind="shuffled"), needs, case[0])
    else:
        check_sampler(SamplerConfig(kind="shuffled"), needs, case[0])


def test_a_loss_imports_neither_the_other_losses_nor_their_libraries():
    code = (
        "import gc, os, sys; gc.disable(); from dml_core.losses.registry import build_loss; build_loss('softmax', {}, 5, 5);"
        "print(*(m for m in sys.modules if m.startswith(('dml_core.losses.', 'sklearn', 'pytorch_metric_learning'))), flush=True);"
        "os._exit(0)"  # unloads nothing
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) == {f"dml_core.losses.{name}" for name in ("registry", "contract", "class_shards", "softmax")}


def test_every_registered_name_leads_to_a_file_of_that_name():
    assert {name: path.split(":")[0] for name, path in LOSSES.items()} == {name: f"dml_core.losses.{name}" for name in LOSSES}


def test_label_smoothing_may_go_as_far_as_to_favour_no_class():
    """With two classes and epsilon 1/2, each class gets a half."""
    build_loss("sgsl", {"label_smoothing": 0.5}, 2, 3)


TEN = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
ANY_LABELS = {
    "int64": torch.arange(10) % 5,
    **{str(dtype): (torch.arange(10) % 5).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)},
    "numpy": np.arange(10) % 5,
    "numpy int32": np.arange(10, dtype=np.int32) % 5,
    "list": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4],
}
ANY_EMBEDDINGS = {
    "leaf": TEN.clone().requires_grad_(),
    "strided": TEN.repeat_interleave(2, 0)[::2],
    "float16": TEN.half(),
    "bfloat16": TEN.bfloat16(),
    "numpy": TEN.numpy(),
}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_batches_of_any_type_give_the_same_loss(case):
    """float16 and bfloat16 embeddings give the loss of the same values in float32."""
    for name, embeddings in ANY_EMBEDDINGS.items():
        wide_ND = TEN.to(getattr(torch, name)).float() if "float" in name else TEN
        expected = build(case).float()(wide_ND, ANY_LABELS["int64"], torch.Generator().manual_seed(0)).total
        for labels in ANY_LABELS.values() if name == "leaf" else [ANY_LABELS["list"]]:
            assert build(case).float()(embeddings, labels, torch.Generator().manual_seed(0)).total == expected


BAD_BATCHES = {
    "label too high": (TEN, torch.arange(10) % 6, r"^training label 5 is outside 0\.\.4: "),
    "label below 0": (TEN, torch.full((10,), -100), r"^training label -100 is outside 0\.\.4: "),
    "int32 label too high": (TEN, (torch.arange(10) % 6).int(), r"^training label 5 is outside 0\.\.4: "),
    "float labels": (TEN, torch.zeros(10), r"^training labels must be int64 class indices, found torch\.float32: convert them$"),
    "truths": (TEN, torch.zeros(10, dtype=torch.bool), r"found torch\.bool: convert them$"),
    "too few labels": (
        TEN,
        torch.zeros(9, dtype=torch.int64),
        r"^a loss over 5 dimensions takes \(N, 5\) and \(N,\), found embeddings \(10, 5\)",
    ),
    "a column of labels": (TEN, torch.zeros(10, 1, dtype=torch.int64), r"and labels \(10, 1\)$"),
    "other dimensions": (TEN[:, :4], torch.zeros(10, dtype=torch.int64), r"found embeddings \(10, 4\)"),
    "nothing": (TEN[:0], torch.zeros(0, dtype=torch.int64), r"found embeddings \(0, 5\)"),
    "integers": (TEN.int(), torch.zeros(10, dtype=torch.int64), r"^embeddings are torch\.int32, this loss computes in "),
    "complex": (TEN + 0j, torch.zeros(10, dtype=torch.int64), r"^embeddings are torch\.complex64, "),
}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_batches_that_no_loss_can_take_are_refused_in_one_line(case):
    loss = build(case).float()
    for batch, (embeddings, labels, message) in BAD_BATCHES.items():
        with pytest.raises(DataError) as refusal:
            loss(embeddings, labels)
        assert re.search(message, str(refusal.value)), batch
        assert "\n" not in str(refusal.value), batch


def test_embeddings_of_another_precision_than_the_centres_are_refused():
    with pytest.raises(DataError, match=r"^embeddings are torch\.float64, this loss computes in torch\.float32: convert one of them$"):
        build_loss("softtriple", {}, 5, 5)(TEN.double(), torch.arange(10) % 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_parameters_in_half_precision_are_refused_in_one_line(case, dtype):
    """A whole network in bfloat16 converts the loss inside it; without parameters and buffers a loss takes the embeddings."""
    loss = build(case).to(dtype)
    if not loss.state_dict():
        assert loss(TEN.to(dtype), torch.arange(10) % 5).total.dtype == torch.float32
        return
    for embeddings in (TEN, TEN.to(dtype)):
        with pytest.raises(DataError, match=rf"^the loss's parameters are {dtype}, and it computes in float32: call loss\.float\(\)$"):
            loss(embeddings, torch.arange(10) % 5)


@pytest.mark.parametrize("name", ["proxy_nca", "softmax", "softtriple"])
def test_a_compiled_loss_takes_labels_of_any_type_and_refuses_those_out_of_range(name):
    """No negative label is left out, as -100 is by torch's cross-entropy."""
    torch.compiler.reset()
    loss = build_loss(name, {}, 5, 5)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for labels in ("int64", "torch.int32", "torch.uint8"):
        assert compiled(TEN, ANY_LABELS[labels]).total == loss(TEN, ANY_LABELS["int64"]).total
    for wrong in (-100, -1, 5):
        with pytest.raises(RuntimeError, match=r"a training label is outside 0\.\.4"):
            compiled(TEN, torch.tensor([wrong, *([0] * 9)]))
