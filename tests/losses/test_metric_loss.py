"""`from dml_core.losses import SoftTriple`: the registered loss as a criterion, with the same values and gradients."""

import copy
import inspect
import pickle
import pydoc
import subprocess
import sys

import numpy as np
import pytest
import torch
from loss_cases import CASES, DIM, NUM_CLASSES, build, case_id, random_batch

import dml_core.losses
from dml_core.errors import ConfigError, DataError
from dml_core.losses.metric_loss import MetricLoss
from dml_core.losses.registry import LOSSES, class_names, loss_class

EMBEDDINGS, LABELS = random_batch()


def criterion(case, seed=0):
    """Build the case's public class as `build` builds the registered one: in float64, with parameters drawn from `seed`."""
    name, options = case
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return public(name)(NUM_CLASSES, DIM, **options).double()


def public(name):
    return getattr(dml_core.losses, LOSSES[name].partition(":")[2])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_value_parts_and_gradients_are_those_of_the_registered_loss(case):
    ours, theirs = criterion(case), build(case)
    ours_ND, theirs_ND = (EMBEDDINGS.clone().requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    value = ours(ours_ND, LABELS)
    torch.manual_seed(1)
    expected = theirs(theirs_ND, LABELS)
    assert isinstance(value, torch.Tensor)
    assert value.shape == ()
    assert torch.equal(value, expected.total)
    assert ours.parts == expected.parts
    value.backward()
    expected.total.backward()
    assert torch.equal(ours_ND.grad, theirs_ND.grad)
    for (name, parameter), (_, same) in zip(ours.loss.named_parameters(), theirs.named_parameters(), strict=True):
        assert (parameter.grad is None and same.grad is None) or torch.equal(parameter.grad, same.grad), name


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_an_optimiser_given_its_parameters_lowers_the_value(case):
    """The embeddings are free, so every loss can fall; the loss is drawn anew from the same generator state at each step."""
    loss, embeddings_ND = criterion(case), EMBEDDINGS.clone().requires_grad_()
    optimiser = torch.optim.Adam([embeddings_ND, *loss.parameters()], lr=0.01)
    values = []
    for _ in range(10):
        torch.manual_seed(0)
        value = loss(embeddings_ND, LABELS)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        values.append(value.item())
    assert values[-1] < values[0]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_copies_pickles_and_states_give_the_same_value(case):
    loss, other = criterion(case), criterion(case, seed=1)
    other.load_state_dict(loss.state_dict())
    values = []
    for same in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), other):
        torch.manual_seed(2)
        values.append(same(EMBEDDINGS, LABELS))
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("name", LOSSES)
def test_signature_help_and_print_have_every_option_with_its_default(name):
    cls, fields = public(name), loss_class(name).Config.model_fields
    assert cls.__name__ == loss_class(name).__name__
    assert issubclass(cls, MetricLoss)
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == ["num_classes", "embedding_dim", *fields]
    for option, field in fields.items():
        assert parameters[option].default == (inspect.Parameter.empty if field.is_required() else field.default)
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert [option for option in ("num_classes", "embedding_dim", *fields) if f"{option}: " not in text] == []
    if not any(field.is_required() for field in fields.values()):
        assert [option for option in fields if f"{option}=" not in repr(cls(NUM_CLASSES, DIM))] == []


def test_names_are_those_of_the_registry():
    assert len(class_names()) == len(LOSSES)
    assert set(class_names()) <= set(dir(dml_core.losses))
    assert dml_core.losses.SoftTriple is dml_core.losses.SoftTriple
    with pytest.raises(AttributeError, match=r"has no loss 'SoftTripple'; did you mean 'SoftTriple'\?$"):
        _ = dml_core.losses.SoftTripple


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((5, 5), {"num_centers": 3}, r"^loss 'softtriple': unknown key 'num_centers'; did you mean 'num_centres'\?"),
        ((5, 5), {"gamma": 0.0}, "gamma"),
        ((1, 5), {}, "at least two classes"),
        ((5.0, 5), {}, r"^loss 'softtriple': num_classes must be a whole number from 1, found 5\.0$"),
        ((True, 5), {}, "num_classes must be a whole number"),
        ((5, 0), {}, "embedding_dim must be a whole number from 1, found 0"),
        ((5, "5"), {}, "embedding_dim must be a whole number from 1, found '5'"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, options, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        dml_core.losses.SoftTriple(*arguments, **options)
    assert "\n" not in str(refusal.value)


def test_wrong_batches_are_one_line():
    loss = dml_core.losses.SoftTriple(NUM_CLASSES, DIM)
    for embeddings, labels, message in (
        (EMBEDDINGS.float()[:, :4], LABELS, r"takes \(N, 5\) and \(N,\), found embeddings \(10, 4\)"),
        (EMBEDDINGS.float(), LABELS + 1, "label 5 is outside 0"),
        (EMBEDDINGS.float(), LABELS.float(), "must be int64 class indices"),
    ):
        with pytest.raises(DataError, match=message):
            loss(embeddings, labels)
    with pytest.raises(DataError, match="remove the miner"):
        loss(EMBEDDINGS.float(), LABELS, (LABELS, LABELS, LABELS))


def test_the_heated_loss_heats_by_the_epoch():
    loss = dml_core.losses.HeatedUpSoftmax(NUM_CLASSES, DIM, heat_from=0.5)
    factors = []
    for epoch in range(4):
        loss.start_epoch(epoch, 4)
        factors.append(loss.learning_rate_factor)
    assert factors == [1.0, 1.0, pytest.approx(0.1), pytest.approx(0.1)]


def test_a_classifier_starts_at_the_class_means():
    loss = dml_core.losses.Softmax(2, 2, better_init=True)
    assert loss.needs.initial_embeddings
    loss.initialise(torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]))
    torch.testing.assert_close(loss.loss.classifier.weight.detach(), torch.eye(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [torch.float16, torch.float32, torch.float64])
def test_a_start_takes_any_types_and_refuses_labels_out_of_range(dtype, wide):
    loss = dml_core.losses.Softmax(2, 2, better_init=True)
    embeddings, labels = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 2.0]]).to(wide), torch.tensor([0, 0, 1]).to(dtype)
    loss.initialise(embeddings, labels)
    torch.testing.assert_close(loss.loss.classifier.weight.detach(), torch.eye(2))
    with pytest.raises(DataError, match=r"^training label 2 is outside 0\.\.1: "):
        loss.initialise(embeddings, labels + 1)


def test_k_means_centroids_take_embeddings_of_double_precision():
    loss = dml_core.losses.Discriminative(NUM_CLASSES, NUM_CLASSES, centroids="kmeans")
    embeddings = torch.randn(10, NUM_CLASSES, generator=torch.Generator().manual_seed(0))
    found = loss(embeddings.double(), LABELS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), loss(embeddings, LABELS))


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_sizes_may_be_numpy_s_integers(integer):
    loss = dml_core.losses.SoftTriple(integer(NUM_CLASSES), integer(DIM))
    assert (type(loss.loss.num_classes), loss.loss.num_classes) == (int, NUM_CLASSES)
    assert repr(loss) == repr(dml_core.losses.SoftTriple(NUM_CLASSES, DIM))


def test_a_loss_compiles_without_a_break():
    loss = dml_core.losses.ProxyNCA(NUM_CLASSES, DIM)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(EMBEDDINGS.float(), LABELS), loss(EMBEDDINGS.float(), LABELS))


def test_the_package_loads_torch_only_for_a_loss():
    code = "import sys, dml_core.losses; dir(dml_core.losses); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
