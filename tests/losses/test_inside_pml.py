"""The five papers' losses in place of pytorch-metric-learning's own, in its trainer and its tester."""

import copy

import numpy as np
import pytest
import torch
from pytorch_metric_learning.testers import GlobalEmbeddingSpaceTester
from pytorch_metric_learning.trainers import MetricLossOnly
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dml_core import ClassBalancedSampler, evaluate
from dml_core.losses import SGSL, Discriminative, HeatedUpSoftmax, SoftTriple, TupletMargin

NUM_CLASSES, NUM_EACH, NUM_EPOCHS = 12, 20, 4
LABELS = torch.arange(NUM_CLASSES).repeat_interleave(NUM_EACH)


class Unit(nn.Module):
    """Unit-length embeddings, which two of the losses expect."""

    def forward(self, rows_ND):
        return nn.functional.normalize(rows_ND)


@pytest.fixture(scope="module")
def dataset(one_thread):
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(NUM_CLASSES, 24, generator=random)
    return TensorDataset(centres[LABELS] + torch.randn(len(LABELS), 24, generator=random), LABELS)


def system(Loss):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, NUM_CLASSES), Unit()), Loss(NUM_CLASSES, NUM_CLASSES)


def sampler():
    return ClassBalancedSampler(LABELS, num_classes_per_batch=6, num_samples_per_class=4, seed=1)


def optimisers(network, loss):
    parts = {"trunk": network, "metric_loss": loss}
    return {f"{name}_optimizer": torch.optim.Adam(part.parameters(), lr=0.02) for name, part in parts.items() if list(part.parameters())}


def scores_of(dataset, network):
    scores = GlobalEmbeddingSpaceTester(dataloader_num_workers=0, data_device="cpu").test({"all": dataset}, 0, network)
    return scores["all"]["precision_at_1_level0"], scores["all"]["mean_average_precision_at_r_level0"]


@pytest.mark.parametrize("Loss", [SoftTriple, HeatedUpSoftmax, Discriminative, TupletMargin, SGSL])
def test_its_trainer_takes_the_steps_of_a_plain_loop_and_its_tester_gives_our_scores(Loss, dataset):
    network, loss = system(Loss)
    untrained = scores_of(dataset, network)
    plain_network, plain_loss = copy.deepcopy((network, loss))
    torch.manual_seed(1)
    MetricLossOnly(
        models={"trunk": network},
        optimizers=optimisers(network, loss),
        batch_size=None,
        loss_funcs={"metric_loss": loss},
        dataset=dataset,
        sampler=sampler(),
        data_device="cpu",
        dataloader_num_workers=0,
    ).train(num_epochs=NUM_EPOCHS)

    plain = optimisers(plain_network, plain_loss)
    torch.manual_seed(1)
    batches = DataLoader(dataset, batch_sampler=sampler())
    for _ in range(NUM_EPOCHS):
        for vectors, labels in batches:
            value = plain_loss(plain_network(vectors), labels)
            for optimiser in plain.values():
                optimiser.zero_grad()
            value.backward()
            for optimiser in plain.values():
                optimiser.step()
    for ours, theirs in ((plain_network, network), (plain_loss, loss)):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

    trained = scores_of(dataset, network)
    assert trained[0] > untrained[0] + 0.1
    scores = evaluate(network(dataset.tensors[0]), LABELS)
    np.testing.assert_allclose((scores["recall@1"], scores["map@r"]), trained, atol=0.005)
