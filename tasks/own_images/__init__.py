"""A person's own images as a dataset of the project: the settings that fit them, written into `params.yaml`."""
