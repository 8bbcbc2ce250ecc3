"""Initialise BatchNorm's running averages before training, as heated-up softmax's released code does (one pass at learning rate 0)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def warm_up_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Run `batches` of images through the model in training mode without learning: only BatchNorm's running averages change.

    The released code uses the training images once, centre-cropped and in order. The model's mode is restored.
    """
    was_training = model.training
    model.train()
    for images in batches:
        model(images)
    model.train(was_training)
