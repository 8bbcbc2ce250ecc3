"""The page docs/how-to/use-the-losses.md and the README of dml-core: their blocks of Python run as they are, in order."""

import re
from importlib.util import find_spec

import pytest
import torch

from dml_core import evaluate
from tests.conftest import ROOT

PAGE = (ROOT / "docs/how-to/use-the-losses.md").read_text()
FIVE = {"SoftTriple", "HeatedUpSoftmax", "Discriminative", "TupletMargin", "SGSL"}


def blocks(text):
    """Return heading -> its block of Python."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)[1:]
    code = [re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL) for body in parts[1::2]]
    return {title: "\n".join(found) for title, found in zip(parts[::2], code, strict=True) if found}


@pytest.fixture(scope="module")
def first_two(one_thread):
    names = {}
    for title in ("An ordinary loop", "All five losses"):
        exec(blocks(PAGE)[title], names)
    return names


@pytest.fixture
def names(first_two):
    """The names that the blocks up to the second define; the first two build on each other, the later ones on these."""
    torch.manual_seed(0)  # the same for each test, alone or after others
    return dict(first_two)


def recall(network, names):
    return evaluate(network(names["dataset"].tensors[0]), names["labels"])["recall@1"]


def untrained_recall(names):
    torch.manual_seed(0)
    return recall(torch.nn.Linear(32, 20), names)


def test_the_loops_learn(names):
    untrained = untrained_recall(names)
    assert untrained < 0.87, "so that there is something to learn"
    assert names["recalls"].keys() == FIVE
    assert {name: value for name, value in names["recalls"].items() if value < untrained + 0.1} == {}


@pytest.mark.parametrize("options", [{"better_init": True}, {}], ids=str)
def test_the_loop_initialises_a_loss_that_needs_it(names, options):
    loss = names["HeatedUpSoftmax"](num_classes=20, embedding_dim=20, **options)
    before = [weights.clone() for weights in loss.parameters()]
    names["train"](names["network"], loss, num_epochs=0)
    assert all(map(torch.equal, before, loss.parameters())) == (not options)


def test_the_training_is_ten_lines():
    assert len(blocks(PAGE)["An ordinary loop"].strip().split("\n\n")[-1].splitlines()) == 10


def test_the_trainer_of_pytorch_metric_learning_learns(names):
    exec(blocks(PAGE)["In the trainer of pytorch-metric-learning"], names)
    found = recall(names["network"], names)
    assert found == pytest.approx(names["scores"]["train"]["precision_at_1_level0"], abs=0.005)  # ties count against a query in ours
    assert found > untrained_recall(names) + 0.1


@pytest.mark.skipif(find_spec("lightning") is None, reason="no Lightning here")
def test_lightning_learns(names):
    exec(blocks(PAGE)["In Lightning"], names)
    assert recall(names["embedder"].network, names) > untrained_recall(names) + 0.1


def test_every_block_of_the_page_has_a_test():
    assert list(blocks(PAGE)) == ["An ordinary loop", "All five losses", "In the trainer of pytorch-metric-learning", "In Lightning"]


def test_the_readme_of_the_library_learns(one_thread):
    (code,) = blocks((ROOT / "dml_core/README.md").read_text()).values()
    names = {}
    exec(code, names)
    assert names["value"].item() < names["loss"](torch.nn.Linear(32, 16)(torch.eye(20, 32)), torch.arange(20)).item() / 2
