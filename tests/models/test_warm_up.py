"""The warm-up pass sets BatchNorm's averages and changes nothing else."""

import pytest
import torch
from torch import nn

from dml_core.models.warm_up import warm_up_batch_norm


@pytest.mark.parametrize("training", [True, False])
def test_only_the_running_averages_change(training):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.05)).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(8, 3)
    warm_up_batch_norm(model, [images] * 200)
    after, outputs = model.state_dict(), model[0](images).detach()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    torch.testing.assert_close(after["1.running_mean"], outputs.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after["1.running_var"], outputs.var(0), rtol=1e-3, atol=1e-3)
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())
