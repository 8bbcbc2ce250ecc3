"""`flows/tables/claims.yaml`: every claim has its measurement, verdicts follow the interval, and the cheap measurements by themselves."""

import math
from pathlib import Path

import pytest
import torch

from dml_core.config import parse, read_yaml
from dml_core.errors import ConfigError
from flows.side.claims import SPEC
from tasks.side import claims
from tasks.side.claims import MEASUREMENTS, Bench, Claim, ClaimsSpec, claims_history, claims_table, judge, measure_claims

SPECIFICATION = parse(ClaimsSpec, read_yaml(SPEC), SPEC.name)
NO_BENCH = Bench({}, {})


def claim(side="above", measure="hard_gradients"):
    texts = dict.fromkeys(("id", "paper", "claim", "evidence", "quantity"), "text")
    return Claim(**texts, measure=measure, side=side)


def test_every_claim_has_its_measurement_and_every_measurement_its_claim():
    assert sorted(entry.measure for entry in SPECIFICATION.claims) == sorted(MEASUREMENTS)
    assert len({entry.id for entry in SPECIFICATION.claims}) == len(SPECIFICATION.claims)
    assert len({entry.paper for entry in SPECIFICATION.claims}) == 5


@pytest.mark.parametrize(
    ("side", "pairs", "verdict"),
    [
        ("above", [(2.0, 1.0), (2.1, 1.0), (1.9, 1.0)], "holds"),
        ("below", [(2.0, 1.0), (2.1, 1.0), (1.9, 1.0)], "refuted"),
        ("below", [(1.0, 2.0), (1.0, 2.1), (1.0, 1.9)], "holds"),
        ("above", [(3.0, 1.0), (1.0, 1.5), (1.2, 1.0)], "not shown"),
        ("above", [(1.0, 1.0), (1.0, 1.0)], "not shown"),
        ("above", [(5.0, 4.0), (50.0, 49.0), (500.0, 499.0)], "holds"),  # paired by seed: the spread between seeds does not count
    ],
)
def test_verdicts(side, pairs, verdict):
    assert judge(claim(side), pairs).verdict == verdict


def test_an_unknown_measurement_is_refused_before_anything_is_measured():
    spec = SPECIFICATION.model_copy(update={"claims": (claim(measure="hard_gradient"),)})
    with pytest.raises(ConfigError, match="did you mean 'hard_gradients'"):
        measure_claims(spec, NO_BENCH, lambda verdict: None)


def test_a_changed_measurement_says_so_on_the_page():
    changed = claim().model_copy(update={"history": "First otherwise."})
    spec = SPECIFICATION.model_copy(update={"claims": (changed, claim()), "history": "Of all."})
    assert claims_history(spec) == "- Of all.\n- text First otherwise."


def test_claims_are_measured_with_every_seed_and_told(monkeypatch):
    monkeypatch.setattr(claims, "side_by_side", lambda work, jobs: ((job, work(job)) for job in jobs))
    spec = SPECIFICATION.model_copy(update={"claims": (claim(),), "seeds": (0, 1, 2)})
    heard = []
    (found,) = measure_claims(spec, NO_BENCH, heard.append)
    assert [line.partition(": ")[0] for line in heard] == ["1 of 3", "2 of 3", "3 of 3"]
    assert found.values == [MEASUREMENTS["hard_gradients"](NO_BENCH, seed)[0] for seed in (0, 1, 2)]
    assert claims_table([found]).splitlines()[2].endswith("| holds |")


@pytest.mark.parametrize("alpha", [0.5, 16.0])
def test_gradient_norms_are_equation_3(alpha):
    """alpha * || sum_m (p_m - q_m) w_m ||, worked out without autograd."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(20, 64, generator=generator))
    noise = torch.nn.functional.normalize(torch.randn(200, 64, generator=generator))
    embeddings = torch.nn.functional.normalize(weight[1] + noise)
    residual = torch.softmax(alpha * embeddings @ weight.T, dim=1)
    residual[:, 0] -= 1.0
    assert claims._gradient_norm(0, alpha, 1) == pytest.approx(float((alpha * residual @ weight).norm(dim=1).mean()), rel=1e-4)


def test_pair_cosines_are_all_pairs(packed: Path):
    run = Bench({"tiny": packed}, {**_tiny_protocol(), "num_epochs": 0}).train("tiny", 0, "softmax", {})
    positive, negative = claims._pair_cosines(run)
    assert (len(positive), len(negative)) == (4 * math.comb(9, 2), math.comb(36, 2) - 4 * math.comb(9, 2))
    assert positive.mean() > negative.mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if "gradients" not in name and "exponent" not in name])
def test_trained_measurements_give_two_finite_numbers(name, packed: Path, monkeypatch):
    monkeypatch.setattr(claims, "MODES", {})  # the tiny dataset has fewer classes and smaller images
    bench = Bench({"modes": packed, "clothes": packed}, _tiny_protocol())
    measured = MEASUREMENTS[name](bench, 0)
    assert all(math.isfinite(value) for value in measured)
    can_tie = name in ("unique_centres", "multi_centre_recall")  # counts: over few images and steps they may be equal
    assert measured[0] != measured[1] or can_tie


def _tiny_protocol():
    protocol = SPECIFICATION.protocol
    backbone = {**protocol["model"]["backbone"], "width": 8}
    return {**protocol, "model": {**protocol["model"], "backbone": backbone}}
