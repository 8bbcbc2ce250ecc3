"""Every registered loss equals a slow float64 reference of its paper's equation, on ordinary and on degenerate batches."""

import pytest
import torch
from loss_cases import BATCHES, CASES, build, case_id
from loss_references import REFERENCES, reference

from dml_core.losses.registry import LOSSES


def test_every_registered_loss_has_a_reference():
    assert set(LOSSES) == set(REFERENCES)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_loss_equals_its_equation(case, batch):
    loss = build(case)
    embeddings_ND, labels_N = BATCHES[batch]()
    expected = reference(case[0], loss, embeddings_ND, labels_N)
    total = loss(embeddings_ND, labels_N, torch.Generator().manual_seed(0)).total
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
