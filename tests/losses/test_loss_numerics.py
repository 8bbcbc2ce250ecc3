"""Gradients are those of the values, and stay finite in half precision at scale 64 and on degenerate batches."""

import pytest
import torch
from loss_cases import BATCHES, CASES, build, case_id, random_batch
from torch.nn import functional

from dml_core.losses.registry import build_loss
from dml_core.losses.tuplets import cos_with_slack

STOPPED = {"sgsl": ["weight_CD"]}  # parameters behind a stop-gradient: their gradient is not that of the value
AT_SCALE_64 = {
    "normalised_softmax": {"scale": 64.0},
    "softtriple": {"scale": 64.0, "num_centres": 3},
    "hardtriple": {"scale": 64.0, "num_centres": 3},
    "heated_up_softmax": {"alpha": 64.0},
    "tuplet_margin": {"scale": 64.0},
    "sgsl": {"gamma": 64.0, "gate": 1e9},
    "l2_constrained_softmax": {"radius": 64.0},
    "proxy_nca": {"scale": 64.0},
}


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradcheck(case):
    loss = build(case).eval()
    embeddings_ND, labels_N = random_batch(8, seed=1)
    names = [name for name, p in loss.named_parameters() if p.requires_grad and name not in STOPPED.get(case[0], [])]

    def total(embeddings, *values):
        return torch.func.functional_call(loss, dict(zip(names, values, strict=True)), (embeddings, labels_N, seeded())).total

    values = [dict(loss.named_parameters())[name].detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(total, (embeddings_ND.requires_grad_(), *values), eps=1e-6, atol=1e-6)


def test_sgsl_gives_its_weights_the_gradient_of_the_softmax_alone():
    embeddings_ND, labels_N = random_batch()
    gradients = []
    for gate in (1e9, 0.0):
        loss = build(("sgsl", {"gate": gate}))
        loss(embeddings_ND, labels_N).total.backward()
        gradients.append(loss.weight_CD.grad)
    torch.testing.assert_close(*gradients, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradients_are_finite_on_degenerate_batches(case, batch):
    embeddings_ND, labels_N = BATCHES[batch]()
    for loss, embeddings in [(build(case), embeddings_ND), (build(case).float(), embeddings_ND.float())]:
        embeddings.requires_grad_()
        loss(embeddings, labels_N, seeded()).total.backward()
        assert torch.isfinite(embeddings.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in loss.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), AT_SCALE_64.items())
def test_half_precision_autocast_loses_nothing_within_the_loss(name, options, dtype):
    """The embeddings are rounded by the network's autocast, the loss computes on them as float32 would."""
    loss = build((name, options)).float()
    half_ND, labels_N = random_batch()[0].to(dtype), random_batch()[1]
    wide_ND = half_ND.float().requires_grad_()
    half_ND.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        total = loss(half_ND, labels_N, seeded()).total
    expected = loss(wide_ND, labels_N, seeded()).total
    torch.testing.assert_close(total, expected)
    total.backward()
    expected.backward()
    assert torch.isfinite(half_ND.grad).all()
    torch.testing.assert_close(half_ND.grad, wide_ND.grad.to(dtype))


@pytest.mark.parametrize("angle", [0.0, 1e-4, 0.05, 1.0, 3.0, torch.pi])
def test_cosine_with_slack_is_the_arc_cosine_s(angle):
    cos = torch.tensor(angle, dtype=torch.float64).cos().requires_grad_()
    value = cos_with_slack(cos, 0.1)
    torch.testing.assert_close(value, torch.tensor(angle - 0.1, dtype=torch.float64).cos(), rtol=0.0, atol=1e-8)
    value.backward()
    assert torch.isfinite(cos.grad)


def test_arc_cosine_itself_is_not_safe_at_one():
    """What the formula avoids: this is pytorch-metric-learning's gradient on a pair of duplicates."""
    cos = torch.ones((), requires_grad=True)
    torch.cos(torch.acos(cos) - 0.1).backward()
    assert not torch.isfinite(cos.grad)


def test_discriminative_loss_is_finite_on_its_own_centroid():
    embeddings_ND = torch.eye(4, requires_grad=True)
    total = build_loss("discriminative", {}, 4, 4)(embeddings_ND, torch.arange(4)).total
    total.backward()
    torch.testing.assert_close(total, torch.tensor(-(2**0.5) / 3), rtol=0.0, atol=1e-3)
    assert torch.isfinite(embeddings_ND.grad).all()


def test_zero_embeddings_have_finite_gradients():
    """A dead network gives zeros; a cosine has no direction there, and must not give a nan."""
    for case in CASES:
        embeddings_ND = torch.zeros(6, 5, requires_grad=True)
        build(case).float()(embeddings_ND, torch.tensor([0, 0, 1, 1, 2, 2]), seeded()).total.backward()
        assert torch.isfinite(embeddings_ND.grad).all(), case
    assert functional.normalize(torch.zeros(1, 2)).eq(0).all()
