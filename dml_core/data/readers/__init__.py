"""The publishers' archives and a person's own folders as rows: one file a dataset; what they share is in `shared`."""
