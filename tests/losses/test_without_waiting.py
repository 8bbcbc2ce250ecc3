"""No loss makes the CPU wait for a GPU: a step on torch's `meta` device, whose tensors have no values that the CPU could read.

There `.item()`, `if tensor`, `nonzero`, an index by a mask, `unique` and `bincount` raise, as do sums of tensors of two devices. A product
of tensors of two devices does not raise; no GPU's results are seen.
"""

import pytest
import torch
from loss_cases import CASES, DIM, NUM_CLASSES, build, case_id

from dml_core.losses.registry import LOSSES

META = torch.device("meta")
LABELS_N = torch.arange(24) // 4 % NUM_CLASSES


def test_every_loss_has_a_case() -> None:
    assert {case[0] for case in CASES} >= set(LOSSES)


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("training", [True, False])
def test_a_step_reads_no_value(case, training):
    loss = build(case).to(META).train(training)
    embeddings_ND = torch.randn(len(LABELS_N), DIM, device=META, dtype=torch.float64, requires_grad=True)
    labels_N = LABELS_N if loss.needs.labels_on_cpu else LABELS_N.to(META)
    output = loss.compute(embeddings_ND, labels_N, None)  # `forward` asks for an autocast, which the device does not have
    assert output.total.is_meta
    output.total.backward()
    assert embeddings_ND.grad is not None
