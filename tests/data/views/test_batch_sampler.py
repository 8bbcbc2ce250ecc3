"""`ClassBalancedSampler`: a BatchSampler of torch with the batches of `samplers`, other ones in each epoch."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from dml_core import ClassBalancedSampler
from dml_core.data.views.samplers import class_balanced_batches, size_weighted_batches
from dml_core.errors import ConfigError, DataError

LABELS = np.array([7, 7, 7, 2, 2, 2, 9, 9, 9, 9, 4, 4, 4, 4])


def test_a_loader_s_epochs_are_the_batches_of_the_training_loop():
    loader = DataLoader(TensorDataset(torch.arange(14)), batch_sampler=ClassBalancedSampler(LABELS, 3, 2, seed=5))
    for epoch in range(3):
        found = [batch.tolist() for (batch,) in loader]
        assert found == [batch.tolist() for batch in class_balanced_batches(LABELS, 3, 2, 5, epoch)]
        assert len(loader) == len(found) > 1
    assert isinstance(loader.batch_sampler, BatchSampler)


def test_a_batch_has_n_images_of_each_of_k_classes():
    for batch in ClassBalancedSampler(LABELS, 3, 2):
        assert sorted(Counter(LABELS[batch]).values()) == [2, 2, 2]
        assert len(set(batch)) == 6


def test_by_size():
    sampler = ClassBalancedSampler(LABELS, 2, 2, seed=3, class_frequency="by_size")
    expected = [batch.tolist() for batch in size_weighted_batches(LABELS, 2, 2, 3, 0)]
    assert list(sampler) == expected
    assert len(sampler) == len(expected)


def test_every_kind_of_labels_gives_the_same_batches():
    first = list(ClassBalancedSampler(LABELS, 3, 2))
    texts = [f"class {label}" for label in LABELS]
    numbers = (LABELS.tolist(), torch.from_numpy(LABELS), torch.from_numpy(LABELS).int(), pd.Series(LABELS))
    for labels in (*numbers, texts, np.array(texts, dtype=object), pd.Series(texts), pd.Categorical(texts)):
        assert list(ClassBalancedSampler(labels, 3, 2)) == first


def test_a_resumed_training_gets_the_batches_of_its_epoch():
    sampler, resumed = ClassBalancedSampler(LABELS, 3, 2), ClassBalancedSampler(LABELS, 3, 2)
    epochs = [list(sampler) for _ in range(4)]
    assert epochs[2] != epochs[3]
    resumed.set_epoch(3)
    assert list(resumed) == epochs[3]


@pytest.mark.parametrize(
    ("labels", "k", "n", "error", "message"),
    [
        (LABELS, 5, 2, ConfigError, "num_classes_per_batch is 5, the training set has 4 classes: lower it"),
        (LABELS, 1, 2, ConfigError, "num_classes_per_batch"),
        (LABELS, 3, 1, ConfigError, "num_samples_per_class"),
        (LABELS / 2, 3, 2, DataError, r"expected one integer or string per image, found float64 of shape \(14,\)"),
        (LABELS[None], 3, 2, DataError, r"found int64 of shape \(1, 14\)"),
        ([], 3, 2, DataError, r"found float64 of shape \(0,\)"),
        (pd.Series(["a", None, "b"]), 2, 2, DataError, r"found object of shape \(3,\)"),
    ],
)
def test_wrong_arguments_are_one_line(labels, k, n, error, message):
    with pytest.raises(error, match=message) as refusal:
        ClassBalancedSampler(labels, k, n)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("seed", [-1, 0.5, "0"])
def test_a_seed_is_a_whole_number_from_0(seed):
    with pytest.raises(ConfigError, match=f"^sampler: seed must be a whole number from 0, found {seed!r}$"):
        ClassBalancedSampler(LABELS, 3, 2, seed)
