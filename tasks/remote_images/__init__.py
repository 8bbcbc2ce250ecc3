"""Images read one by one from a bucket: datasets larger than a machine's disk."""
