"""The samplers follow the rules in their docstrings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dml_core.config import parse
from dml_core.data.views import samplers
from dml_core.data.views.samplers import (
    SamplerConfig,
    check_sampler,
    class_balanced_batches,
    epoch_batches,
    first_batch_size,
    shuffled_batches,
    size_weighted_batches,
    triplet_batches,
)
from dml_core.errors import ConfigError
from dml_core.losses.contract import Needs

LABELS = np.repeat(np.arange(7), [1, 2, 3, 4, 5, 6, 20])


def same(left, right):
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 60), batch_size=st.integers(1, 20), epoch=st.integers(0, 3))
def test_shuffled_epoch_holds_every_image_once_but_a_last_one_alone(num_samples, batch_size, epoch):
    batches = shuffled_batches(num_samples, batch_size, seed=1, epoch=epoch, drop_last=False)
    is_left_out = num_samples > batch_size > 1 and num_samples % batch_size == 1
    order = np.random.default_rng((1, epoch)).permutation(num_samples)
    assert np.concatenate(batches).tolist() == order[: num_samples - is_left_out].tolist()
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert min(map(len, batches)) > 1 or batch_size == 1 or num_samples == 1


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
    by_size = balanced.model_copy(update={"class_frequency": "by_size"})
    assert same(epoch_batches(by_size, LABELS, 5, 2), size_weighted_batches(LABELS, 3, 4, 5, 2))


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
    """A queue of shuffled rounds gives the first k different classes; each class gives the first n of its shuffled images."""
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


def fast_reids_round(random, k=3, n=4):
    """NaiveIdentitySampler rewritten with plain lists: return the batches of one round, as lists of (class, images)."""
    left = {c: np.flatnonzero(c == LABELS).tolist() for c in range(7)}
    for c, images in left.items():
        left[c] = random.permutation(images if len(images) >= n else random.choice(images, n)).tolist()
    available, batches = list(left), []
    while len(available) >= k:
        batch = []
        for c in random.choice(available, k, replace=False):
            batch.append((int(c), [left[c].pop(0) for _ in range(n)]))
            if len(left[c]) < n:
                available.remove(c)
        batches.append(batch)
    return batches


def test_batches_by_size_come_as_often_as_fast_reids():
    """Mean share of each class in an epoch, which is one round and the beginning of the next: 41 images make 3 batches of 12."""
    theirs, ours = np.zeros(7), np.zeros(7)
    for draw in range(2000):
        random, batches = np.random.default_rng(draw), []
        while len(batches) < 3:
            batches += fast_reids_round(random)
        for batch in batches[:3]:
            theirs[[c for c, _ in batch]] += 1
        for batch in size_weighted_batches(LABELS, 3, 4, seed=1, epoch=draw):
            ours[LABELS[batch[::4]]] += 1
    assert ours.sum() == theirs.sum() == 2000 * 9
    assert ours / ours.sum() == pytest.approx(theirs / theirs.sum(), abs=0.01)
    assert ours[6] > 1.3 * ours[:6].mean()  # the class of 20 images has five groups, every other class one


@pytest.mark.parametrize("epoch", range(20))
def test_a_batch_by_size_is_k_groups_and_a_round_uses_no_image_twice(epoch):
    labels = np.repeat(np.arange(7), [1, 2, 3, 8, 9, 10, 20])
    batches = size_weighted_batches(labels, 3, 4, seed=2, epoch=epoch)
    assert len(batches) == 53 // 12
    for batch in batches:
        assert [len(set(labels[group])) for group in batch.reshape(3, 4)] == [1, 1, 1]
        assert len(set(labels[batch])) == 3
    first_round = np.concatenate(batches[:2])  # 13 groups of 7 classes make at least two batches
    large = first_round[labels[first_round] >= 3]
    assert len(set(large)) == len(large)


def test_batches_by_size_derive_from_seed_and_epoch_alone():
    assert same(size_weighted_batches(LABELS, 3, 4, 5, 2), size_weighted_batches(LABELS, 3, 4, 5, 2))
    for other in ((5, 3), (6, 2)):
        assert not same(size_weighted_batches(LABELS, 3, 4, 5, 2), size_weighted_batches(LABELS, 3, 4, *other))


def test_a_few_images_still_make_a_batch_by_size_and_too_few_classes_are_refused():
    assert len(size_weighted_batches(np.array([0, 1]), 2, 8, 0, 0)) == 1
    with pytest.raises(ConfigError, match="has 7 classes: lower it"):
        size_weighted_batches(LABELS, 8, 4, 0, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"class_frequency": "by_size"}, "kind is 'shuffled', so class_frequency has no place: set it to null"),
        ({"kind": "k_by_n", "drop_last": True}, "kind is 'k_by_n', so drop_last has no place: set it to null"),
        ({"kind": "mined_triplets", "drop_last": True}, "kind is 'mined_triplets', so drop_last has no place: set it to null"),
    ],
)
def test_options_that_the_kind_does_not_read_are_refused(values, message):
    with pytest.raises(ConfigError, match=f"^sampler: {message}$"):
        parse(SamplerConfig, values, "sampler")


@settings(derandomize=True, deadline=None, max_examples=30)
@given(batch_size=st.integers(1, 20), epoch=st.integers(0, 3))
def test_every_image_with_a_fellow_is_once_the_first_of_a_triplet(batch_size, epoch):
    negatives = np.array([np.flatnonzero(label != LABELS)[:4] for label in LABELS])
    batches = triplet_batches(LABELS, negatives, batch_size, 0, epoch)
    assert {len(batch) for batch in batches[:-1]} <= {3 * max(1, batch_size // 3)}
    anchors, positives, others = np.concatenate(batches).reshape(-1, 3).T
    assert sorted(anchors) == list(range(1, len(LABELS)))  # class 0 has a single image
    assert (LABELS[anchors] == LABELS[positives]).all()
    assert (anchors != positives).all()
    assert all(other in negatives[anchor] for anchor, other in zip(anchors, others, strict=True))
    assert same(batches, triplet_batches(LABELS, negatives, batch_size, 0, epoch))
    assert not same(batches, triplet_batches(LABELS, negatives, batch_size, 0, epoch + 1))


def test_mined_triplets_are_what_the_configuration_asks_for_and_hold_pairs_of_a_class():
    config, negatives = (
        SamplerConfig(kind="mined_triplets", batch_size=8),
        np.array([np.flatnonzero(label != LABELS)[:4] for label in LABELS]),
    )
    assert same(epoch_batches(config, LABELS, 3, 1, negatives), triplet_batches(LABELS, negatives, 8, 3, 1))
    assert first_batch_size(config, len(LABELS), 7) == 6
    check_sampler(config, Needs(sampler="k_by_n"), "tuplet_margin")


@pytest.mark.parametrize(("num_classes", "num_wanted"), [(2, 2), (5, 4), (7, 5), (60, 12)])
def test_classes_come_in_the_order_of_a_plain_queue(num_classes: int, num_wanted: int) -> None:
    """The expected classes are the first different ones of the queue; each is removed from it at its first place."""
    ours, plain = np.random.default_rng(0), np.random.default_rng(0)
    waiting: list[int] = []
    queue: list[int] = []
    for _ in range(50):
        if len(queue) < num_wanted:
            queue.extend(plain.permutation(num_classes).tolist())
        expected = list(dict.fromkeys(queue))[:num_wanted]
        for taken in expected:
            queue.remove(taken)
        assert samplers._next_classes(waiting, num_classes, num_wanted, ours) == expected
        assert waiting == queue


def test_mined_triplets_of_classes_of_one_image_are_refused():
    with pytest.raises(ConfigError, match=r"^sampler: mined_triplets needs a class with two images, the training set has none"):
        triplet_batches(np.arange(4), np.zeros((4, 1), dtype=np.int64), 9, 0, 0)
