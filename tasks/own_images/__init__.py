"""Add a user's images to the project as a dataset, with fitted settings in `params.yaml`."""
