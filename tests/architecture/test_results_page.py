"""The numbers in the text of docs/explanation/results.md are those of the committed results."""

import csv
import json
import re

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs/explanation/results.md").read_text()
NAMED = {"proxynca": "proxy-nca", "untrained network": "untrained"}
SECTIONS = {"## Drawn images": "synthetic", "## Fashion-MNIST": "fashion-mnist"}


def section(title: str) -> str:
    return PAGE.partition(f"\n{title}")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("title", "dataset"), SECTIONS.items())
def test_a_mean_in_brackets_is_that_of_the_variant_before_it(title: str, dataset: str) -> None:
    with (ROOT / f"results/{dataset}/scores.csv").open() as file:
        means = {row["variant"]: 100 * float(row["mean"]) for row in csv.DictReader(file) if row["metric"] == "recall@1"}
    named = {name.replace("-", " "): name for name in means} | NAMED
    text = section(title).lower().replace("-", " ")
    found = re.findall(rf"({'|'.join(sorted(named, key=len, reverse=True))}) \((\d+\.\d)\)", text)
    best = re.findall(r"best mean recall@1 is (.*?)'s, (\d+\.\d)", text)
    assert len(found) >= 3
    assert len(best) == 1
    for name, figure in found + best:
        assert f"{means[named[name]]:.1f}" == figure, name


def test_the_counts_of_claims_are_those_of_the_page() -> None:
    claims = json.loads((ROOT / "docs/pages/project/claims.json").read_text())["claims"]
    counts = [sum(claim["judgement"] == judgement for claim in claims) for judgement in ("holds", "not shown", "refuted")]
    held, not_shown, refuted = counts
    assert f"{held} of {len(claims)} hold, {not_shown} are not shown, {refuted} is refuted" in section("## Claims")
