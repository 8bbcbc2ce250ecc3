"""Deep metric learning: losses, heads, samplers, the training loop and the evaluator. Knows torch, numpy and FAISS, no service."""
