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


@pytest.mark.parametrize(
    ("table", "title", "sentence"),
    [
        ("claims", "## Claims", "{held} of {all} hold, {not_shown} are not shown, {refuted} is refuted"),
        ("fashion_mnist", "## Fashion", "table's {all} claims {held} hold, {not_shown} are not shown and {refuted} are refuted"),
    ],
)
def test_the_counts_of_claims_are_those_of_the_page(table: str, title: str, sentence: str) -> None:
    judgements = [claim["judgement"] for claim in json.loads((ROOT / f"docs/pages/project/{table}.json").read_text())["claims"]]
    held, not_shown, refuted = map(judgements.count, ("holds", "not shown", "refuted"))
    expected = sentence.format(held=held, not_shown=not_shown, refuted=refuted, all=len(judgements))
    assert expected in " ".join(section(title).split())
