"""Sharded sums over classes: the split of the classes by hand, and one worker against torch (several workers: tests/training)."""

import pytest
import torch
import torch.distributed as dist

from dml_core.losses import class_shards
from dml_core.losses.class_shards import ClassShard

SIZES = (3, 2, 2)


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/meet", rank=0, world_size=1)
    yield ClassShard((5,), 0)
    dist.destroy_process_group()


def logits_and_labels():
    logits_NC = 5 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits_NC.requires_grad_(), torch.tensor([4, 0, 2, 2])


def test_each_worker_has_a_contiguous_part():
    parts = [ClassShard(SIZES, rank).cut(torch.arange(14).view(2, 7), 1).tolist() for rank in range(3)]
    assert parts == [[[0, 1, 2], [7, 8, 9]], [[3, 4], [10, 11]], [[5, 6], [12, 13]]]


@pytest.mark.parametrize(("rank", "columns", "here"), [(0, [0, 2, 2, 2], [1, 1, 0, 0]), (1, [0, 0, 0, 1], [0, 0, 1, 0])])
def test_a_class_s_column_is_where_its_worker_has_it(rank, columns, here):
    column_N1, is_here_N1 = class_shards.own_columns(torch.tensor([0, 2, 3, 6]), ClassShard(SIZES, rank))
    assert column_N1.squeeze(1).tolist() == columns
    assert is_here_N1.squeeze(1).tolist() == [bool(value) for value in here]


def test_without_a_shard_every_class_is_here():
    column_N1, is_here_N1 = class_shards.own_columns(torch.tensor([3, 1]), None)
    assert column_N1.tolist() == [[3], [1]]
    assert is_here_N1.tolist() == [[True], [True]]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_and_its_gradient_are_torch_s(group_of_one, smoothing):
    found, expected = [], []
    for seen, shard in ((found, group_of_one), (expected, None)):
        logits_NC, labels_N = logits_and_labels()
        total = class_shards.cross_entropy(logits_NC, labels_N, shard, smoothing)
        (3 * total).backward()
        seen += [total.detach(), logits_NC.grad]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_others_log_sum_exp_and_the_own_logit_are_torch_s(group_of_one):
    found, expected = [], []
    for seen, shard in ((found, group_of_one), (expected, None)):
        logits_NC, labels_N = logits_and_labels()
        others_N = class_shards.logsumexp(class_shards.without_own(logits_NC, labels_N, shard), shard)
        own_N = class_shards.own_logits(logits_NC, labels_N, shard)
        (others_N * torch.arange(4) - own_N.square()).sum().backward()
        seen += [others_N.detach(), own_N.detach(), logits_NC.grad]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_joined_parts_and_means_over_classes(group_of_one):
    whole = torch.randn(2, 5, 3)
    assert torch.equal(group_of_one.join(group_of_one.cut(whole, 1), 1), whole)
    assert class_shards.mean_over_classes(torch.tensor(7.0), group_of_one) == 7.0
    assert class_shards.mean_over_classes(torch.tensor(7.0), None) == 7.0
