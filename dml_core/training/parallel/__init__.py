"""One batch over several workers: synchronised statistics and gradients, sharded classes, cached gradients, cross-batch memory."""
