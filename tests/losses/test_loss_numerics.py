"""Gradients match the values, and stay finite in half precision at scale 64 and on degenerate batches."""

from itertools import product

import pytest
import torch
from loss_cases import BATCHES, CASES, build, case_id, random_batch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from dml_core.losses.registry import build_loss
from dml_core.losses.tuplet_margin import cos_with_slack
from dml_core.unit_length import unit_length
from tests.conftest import ROOT

STOPPED = {"sgsl": ["weight_CD"]}  # parameters behind a stop-gradient, whose gradient does not match the value
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


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_parameter_has_a_gradient_whatever_the_batch_and_the_epoch(case):
    """With several workers a step without one raises."""
    for epoch, batch in product((None, 0, 9), BATCHES.values()):
        loss, (embeddings, labels) = build(case), batch()
        if epoch is not None:
            loss.start_epoch(epoch, 10)
        loss(embeddings.requires_grad_(), labels, seeded()).total.backward()
        assert [name for name, p in loss.named_parameters() if p.requires_grad and p.grad is None] == [], batch.__name__


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
    """Autocast rounds the embeddings in the network; the loss computes on them in float32."""
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
    """The arc cosine, used by pytorch-metric-learning, has no finite gradient on a pair of duplicates; our formula avoids it."""
    cos = torch.ones((), requires_grad=True)
    torch.cos(torch.acos(cos) - 0.1).backward()
    assert not torch.isfinite(cos.grad)


def test_discriminative_loss_is_finite_on_its_own_centroid():
    embeddings_ND = torch.eye(4, requires_grad=True)
    total = build_loss("discriminative", {}, 4, 4)(embeddings_ND, torch.arange(4)).total
    total.backward()
    torch.testing.assert_close(total, torch.tensor(-(2**0.5) / 3), rtol=0.0, atol=1e-3)
    assert torch.isfinite(embeddings_ND.grad).all()


def largest_gradient(case, embeddings_ND):
    """Return the largest entry of the embeddings' gradient, and the loss."""
    labels_N, embeddings_ND = torch.tensor([0, 0, 1, 1, 2, 2]), embeddings_ND.clone().requires_grad_()
    total = build(case).float()(embeddings_ND, labels_N, seeded()).total
    total.backward()
    return embeddings_ND.grad.abs().max(), total


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradients_are_bounded_however_short_or_long_the_embeddings_are(case):
    """A zero row has no direction: an epsilon of 1e-12 would give it a gradient of 1e12, which an optimiser's moments keep for days."""
    ordinary_ND = random_batch(6)[0].float()
    reference, _ = largest_gradient(case, ordinary_ND)
    for scale in (0.0, 1e-38, 1e-20, 1e-12, 1e-7, 1e-5, 1e4, 1e18):
        for rows in ([3], slice(None)):
            scales_N1 = torch.ones(6, 1)
            scales_N1[rows] = scale
            gradient, total = largest_gradient(case, ordinary_ND * scales_N1)
            if torch.isfinite(total) or scale <= 1e4:  # training stops at a loss that is not finite
                true_growth = 1 / scale if 1e-6 < scale < 1 else max(1.0, scale)  # gradient of normalising; of squared lengths
                assert gradient <= 100 * (1 + reference) * true_growth, (scale, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(50, 8), (3, 7, 5), (4, 1)])
def test_rows_of_ordinary_length_are_normalised_as_torch_does_to_the_last_bit(shape, dtype):
    rows, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) for seed in (0, 1))
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    unit, expected = unit_length(ours), functional.normalize(theirs, dim=-1)
    unit.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(unit, expected)
    assert torch.equal(ours.grad, theirs.grad)


def test_a_row_without_a_direction_stays_as_it_is_and_alone():
    rows = torch.tensor([[0.0, 0.0], [3e-7, 4e-7], [3e-5, 4e-5], [3.0, 4.0]], requires_grad=True)
    unit = unit_length(rows)
    torch.testing.assert_close(unit.detach(), torch.tensor([[0.0, 0.0], [3e-7, 4e-7], [0.6, 0.8], [0.6, 0.8]]))
    unit[:, 0].sum().backward()
    torch.testing.assert_close(rows.grad, torch.tensor([[1.0, 0.0], [1.0, 0.0], [12800.0, -9600.0], [0.128, -0.096]]))


def test_nothing_else_normalises():
    """Losses, heads and centres share one normalisation function."""
    files = [*(ROOT / "dml_core/losses").rglob("*.py"), *(ROOT / "dml_core/models").rglob("*.py")]
    assert len(files) > 25
    assert [path.name for path in files if "normalize(" in path.read_text()] == []


class RoundedToTF32(TorchDispatchMode):
    """Round the factors of every matrix product to TF32's 10 bits, as a GPU does after `set_float32_matmul_precision("high")`."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "_cdist_forward", "_euclidean_dist")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.PRODUCTS:
            args = tuple(self.rounded(arg) if isinstance(arg, torch.Tensor) and arg.dim() >= 2 else arg for arg in args)
            self.num_products += 1
        return func(*args, **(kwargs or {}))

    num_products = 0

    @staticmethod
    def rounded(factor):
        return ((factor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


MORE_CENTRES = [(name, {"num_centres": k}) for name in ("softtriple", "hardtriple") for k in (2, 10)]  # both ways to compute cosines


@pytest.mark.parametrize("batch", ["random", "duplicate", "collinear"])
@pytest.mark.parametrize("are_merged", [False, True])
@pytest.mark.parametrize("case", [*CASES, *MORE_CENTRES], ids=case_id)
def test_products_rounded_to_tf32_give_finite_gradients_and_nearly_the_value(case, are_merged, batch):
    loss = build(case).float()
    if are_merged:  # all centres, proxies or classifier rows coincide, so that their cosines are 1 except for rounding
        for parameter in [parameter for parameter in loss.parameters() if parameter.dim() > 1]:
            parameter.data[:] = parameter.data[..., :1, :] if parameter.dim() < 3 else parameter.data[:1, :1]
    embeddings_ND, labels_N = BATCHES[batch]()
    embeddings_ND = embeddings_ND.float().requires_grad_()
    expected = loss(embeddings_ND, labels_N, seeded()).total
    loss.zero_grad()
    with RoundedToTF32():
        total = loss(embeddings_ND, labels_N, seeded()).total
        total.backward()
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0.05)
    gradients = [embeddings_ND.grad, *(p.grad for p in loss.parameters() if p.grad is not None)]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
