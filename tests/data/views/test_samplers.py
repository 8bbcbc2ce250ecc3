"""The samplers' rules as their docstrings state them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dml_core.config import parse
from dml_core.data.views.samplers import (
    SamplerConfig,
    check_sampler,
    class_balanced_batches,
    epoch_batches,
    first_batch_size,
    shuffled_batches,
)
from dml_core.errors import ConfigError
from dml_core.losses.contract import Needs

LABELS = np.repeat(np.arange(7), [1, 2, 3, 4, 5, 6, 20])


def same(left, right):
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 60), batch_size=st.integers(1, 20), epoch=st.integers(0, 3))
def test_shuffled_epoch_holds_every_image_once(num_samples, batch_size, epoch):
    batches = shuffled_batches(num_samples, batch_size, seed=1, epoch=epoch, drop_last=False)
    assert sorted(np.concatenate(batches)) == list(range(num_samples))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


@pytest.mark.parametrize(("num_samples", "sizes"), [(7, [3, 3]), (6, [3, 3]), (3, [3])])
def test_drop_last_leaves_out_only_an_incomplete_batch(num_samples, sizes):
    assert [len(batch) for batch in shuffled_batches(num_samples, 3, seed=0, epoch=0, drop_last=True)] == sizes


def test_drop_last_of_everything_is_refused():
    config = SamplerConfig(batch_size=6, drop_last=True)
    for call in (lambda: shuffled_batches(5, 6, seed=0, epoch=0, drop_last=True), lambda: first_batch_size(config, 5, 3)):
        with pytest.raises(ConfigError, match=r"^sampler: drop_last with batch_size 6 drops all 5 images: lower batch_size$"):
            call()
    assert first_batch_size(config, 6, 3) == 6


def test_the_configuration_chooses_the_sampler():
    shuffled = SamplerConfig(batch_size=6, drop_last=True)
    balanced = SamplerConfig(kind="k_by_n", num_classes_per_batch=3, num_samples_per_class=4)
    assert same(epoch_batches(shuffled, LABELS, 5, 2), shuffled_batches(41, 6, 5, 2, drop_last=True))
    assert same(epoch_batches(balanced, LABELS, 5, 2), class_balanced_batches(LABELS, 3, 4, 5, 2))


@pytest.mark.parametrize(("num_samples", "size"), [(5, 5), (6, 6), (70, 6)])
def test_the_first_batch_holds_what_there_is_or_what_it_can(num_samples, size):
    assert first_batch_size(SamplerConfig(batch_size=6), num_samples, 2) == size
    assert first_batch_size(SamplerConfig(kind="k_by_n", num_classes_per_batch=2, num_samples_per_class=7), num_samples, 2) == 14


@pytest.mark.parametrize("kind", ["shuffled", "k_by_n"])
def test_batches_derive_from_seed_and_epoch_alone(kind):
    config = SamplerConfig(kind=kind, batch_size=8, num_classes_per_batch=3, num_samples_per_class=4)
    first = epoch_batches(config, LABELS, seed=5, epoch=2)
    np.random.seed(9)
    assert same(first, epoch_batches(config, LABELS, seed=5, epoch=2))
    assert not same(first, epoch_batches(config, LABELS, seed=5, epoch=3))
    assert not same(first, epoch_batches(config, LABELS, seed=6, epoch=2))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(k=st.integers(2, 7), n=st.integers(2, 6), seed=st.integers(0, 5))
def test_balanced_batches_hold_k_classes_with_n_images_in_runs(k, n, seed):
    for batch in class_balanced_batches(LABELS, k, n, seed=seed, epoch=0):
        runs = LABELS[batch].reshape(k, n)
        assert (runs == runs[:, :1]).all()
        assert len(set(runs[:, 0])) == k
        for images in batch.reshape(k, n):
            _, uses = np.unique(images, return_counts=True)
            size = np.sum(LABELS[images[0]] == LABELS)
            assert len(uses) == min(n, size)
            assert uses.max() - uses.min() <= 1


def test_balanced_epoch_is_as_long_as_a_shuffled_one_and_never_empty():
    assert len(class_balanced_batches(LABELS, 2, 4, seed=0, epoch=0)) == round(41 / 8)
    assert len(class_balanced_batches(LABELS, 7, 20, seed=0, epoch=0)) == 1


@pytest.mark.parametrize("k", [2, 3, 5])
def test_no_class_comes_again_long_before_the_others(k):
    labels = np.repeat(np.arange(7), 30)
    order = [int(labels[batch[i]]) for batch in class_balanced_batches(labels, k, 2, seed=3, epoch=1) for i in range(0, 2 * k, 2)]
    uses = np.zeros(7, int)
    for chosen in order[: len(order) // 7 * 7]:
        uses[chosen] += 1
        assert uses.max() - uses.min() <= 2
    assert uses.max() - uses.min() <= 1


def test_too_few_classes_are_refused():
    config = SamplerConfig(kind="k_by_n", num_classes_per_batch=8)
    for call in (lambda: class_balanced_batches(LABELS, 8, 2, seed=0, epoch=0), lambda: first_batch_size(config, 41, 7)):
        with pytest.raises(ConfigError, match=r"^sampler: num_classes_per_batch is 8, the training set has 7 classes: lower it$"):
            call()


@pytest.mark.parametrize("k", [2, 3, 7])
def test_balanced_batches_are_those_of_the_rules_followed_slowly(k):
    """A queue of shuffled rounds, the first k different classes of it, and of each class n images from its shuffled images."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(7), 30))
    random, queue = np.random.default_rng((4, 2)), []
    for batch in class_balanced_batches(labels, k, 5, seed=4, epoch=2):
        if len(queue) < k:
            queue += list(random.permutation(7))
        chosen = []
        for c in list(queue):
            if c not in chosen and len(chosen) < k:
                chosen.append(c)
                queue.remove(c)
        assert batch.tolist() == [i for c in chosen for i in random.permutation(np.flatnonzero(labels == c))[:5]]


def test_labels_may_be_any_integers():
    batches = class_balanced_batches(np.array([40, -3, 40, -3, 12, 12]), 3, 2, seed=0, epoch=0)
    assert sorted(batches[0]) == [0, 1, 2, 3, 4, 5]


def test_a_loss_over_pairs_refuses_a_shuffled_sampler():
    with pytest.raises(ConfigError, match=r"loss 'triplet' needs several images of a class.*set 'k_by_n'"):
        check_sampler(SamplerConfig(), Needs(sampler="k_by_n"), "triplet")
    check_sampler(SamplerConfig(kind="k_by_n"), Needs(sampler="k_by_n"), "triplet")
    check_sampler(SamplerConfig(), Needs(), "softmax")


@pytest.mark.parametrize("values", [{"batch_size": 0}, {"kind": "random"}, {"num_samples_per_class": 1}, {"batchsize": 3}])
def test_bad_sampler_settings_are_refused(values):
    with pytest.raises(ConfigError, match=r"^sampler: "):
        parse(SamplerConfig, values, "sampler")
