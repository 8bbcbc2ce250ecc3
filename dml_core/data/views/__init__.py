"""From a stored image to the network's input: transforms, samplers and batches."""
